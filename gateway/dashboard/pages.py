"""The dashboard: is it learning, and if not, why."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Depends, Query, Request
from sqlalchemy import Connection
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from gateway.dashboard import charts, conversation, langfuse, probability, views
from gateway.dashboard.rendering import HEADERS, page
from gateway.gateway import Gateway, gateway_of
from gateway.store import queries
from gateway.store.census import Census
from gateway.store.readiness import with_states
from gateway.telemetry.remembered import Remembered
from gateway.telemetry.telemetry import Telemetry

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
Strop = Annotated[Gateway, Depends(gateway_of)]
T = TypeVar("T")

_STATIC = {
    path.name: path
    for path in (Path(__file__).parent / "static").iterdir()
    if path.suffix in (".js", ".css", ".svg", ".txt")
}
_PATIENCE = 0.5
"""Seconds that a page waits for counts over the whole database the first time."""
_LIVE_SECONDS = 2.0

_TRAFFIC: WeakKeyDictionary[Any, dict[str, Remembered[list[int]]]] = WeakKeyDictionary()
"""By application and project."""

Chosen = Annotated[str | None, Query()]
_LARGEST = 2**63 - 1
"""What a database takes as a number."""


async def _read(gateway: Gateway, view: Callable[[Connection], T]) -> T:
    def ask() -> T:
        with gateway.database.read() as connection:
            return view(connection)

    return await asyncio.to_thread(ask)


async def _census(request: Request, gateway: Gateway) -> Census | None:
    """The counts over the whole database; None while they are taken for the first time."""
    telemetry: Telemetry = request.app.state.telemetry
    return await telemetry.census(gateway.database).within(_PATIENCE)


def _missing(request: Request, what: str) -> HTMLResponse:
    return page(request, "missing.html", 404, what=what)


def _whole(text: str | None) -> int | None:
    """A number in an address, as a database takes it; None: it is none."""
    if text is None or not text.isdecimal() or len(text) > 19:
        return None
    number = int(text)
    return number if number <= _LARGEST else None


def _time(text: str | None) -> float | None:
    """Unix seconds in an address; None: they are none."""
    try:
        found = float(text) if text is not None else None
    except ValueError:
        return None
    return found if found is not None and math.isfinite(found) else None


@router.get("/")
async def overview(request: Request, gateway: Strop) -> HTMLResponse:
    """What is served, how each version did, what waits and why."""
    project = gateway.project
    found = await _read(gateway, lambda c: views.overview(c, project))
    census = await _census(request, gateway)
    rewards = {
        row["name"]: census.rewards.get((project, row["name"]), []) if census else []
        for row in found.policies
    }
    waiting: dict[str, dict[str, int]] = {row["name"]: {} for row in found.policies}
    left_out: dict[str, dict[str, int]] = {row["name"]: {} for row in found.policies}
    if census is not None:
        for (owner, name, state, *_), count in census.groups.items():
            if owner == project and name in waiting:
                waiting[name][state] = waiting[name].get(state, 0) + count
        for (owner, name, _, state, reason), count in census.trajectories.items():
            if owner == project and name in left_out and state == "skipped":
                left_out[name][reason] = left_out[name].get(reason, 0) + count
    counts = await _traffic(request, gateway).within(_PATIENCE)
    return page(
        request,
        "overview.html",
        found=found,
        counted=census is not None,
        waiting=waiting,
        left_out=left_out,
        recent={name: views.by_version(of)[:4] for name, of in rewards.items()},
        charts={
            name: charts.lines(
                f"Mean reward of {name} by version, training and held out",
                views.reward_series(list_of),
                "version",
                next(row["alias"] for row in found.policies if row["name"] == name),
            )
            for name, list_of in rewards.items()
        },
        traffic=counts or [],
        traffic_chart=charts.bars("Completions of each of the last 60 minutes", counts or []),
        replicas=gateway.pool.replicas,
        served={policy.name: policy for policy in gateway.publisher.catalog.of(project)},
        pending=gateway.writer.pending,
        journal=gateway.writer.journal.state() if gateway.writer.journal is not None else None,
    )


def _traffic(request: Request, gateway: Gateway) -> Remembered[list[int]]:
    known: dict[str, Remembered[list[int]]] = _TRAFFIC.setdefault(request.app, {})
    key = gateway.project
    if key not in known:

        def ask() -> list[int]:
            with gateway.database.read() as connection:
                return views.traffic(connection, gateway.project)

        known[key] = Remembered(ask, 2.0)
    return known[key]


@router.get("/policies/{name}")
async def policy(name: str, request: Request, gateway: Strop, said: Chosen = None) -> HTMLResponse:
    """One policy's versions, what they earned, and the levers."""
    found = await _read(gateway, lambda c: views.policy(c, gateway.project, name))
    if found is None:
        return _missing(request, f"policy {name}")
    census = await _census(request, gateway)
    rewards = census.rewards.get((gateway.project, name), []) if census else []
    alias = found.policy["alias"]
    return page(
        request,
        "policy.html",
        found=found,
        policy=found.policy,
        rewards=dict(views.by_version(rewards)),
        counted=census is not None,
        said=said,
        backward=[
            v["number"]
            for v in found.versions
            if v["state"] in ("serving", "retired")
            and v["number"] != alias
            and v["deleted_at"] is None
        ],
        by_version={row["version"]: row for row in found.steps if row["version"] is not None},
        chart=charts.lines(
            f"Mean reward of {name} by version, training and held out",
            views.reward_series(rewards),
            "version",
            alias,
        ),
        metrics=[
            (title, charts.lines(title, views.metric_series(found.steps, key, title), "version"))
            for key, title in (
                ("kl", "KL to the reference, nats"),
                ("staleness_mean", "Staleness, versions"),
                ("groups_taught_nothing", "Share of groups that taught nothing"),
                ("entropy", "Entropy, nats"),
            )
        ],
    )


@router.get("/groups")
async def groups(
    request: Request,
    gateway: Strop,
    policy: Chosen = None,
    before: Chosen = None,
) -> HTMLResponse:
    """Groups, the most recently active first."""
    until, now = _time(before), time.time()

    def view(connection: Connection) -> tuple[list[queries.GroupSummary], list[str]]:
        policies = queries.policies(connection, gateway.project)
        found = queries.groups(
            connection,
            gateway.project,
            policy or None,
            now=now,
            limit=views.GROUPS + 1,
            before=until,
        )
        return with_states(found, policies, now), [row["name"] for row in policies]

    found, names = await _read(gateway, view)
    return page(
        request,
        "groups.html",
        groups=found[: views.GROUPS],
        more=len(found) > views.GROUPS,
        names=names,
        chosen=policy or "",
        before=until,
    )


@router.get("/groups/{policy}/{group_id:path}")
async def group(policy: str, group_id: str, request: Request, gateway: Strop) -> HTMLResponse:
    """The answers of one group side by side."""
    found = await _read(gateway, lambda c: views.group(c, gateway.project, policy, group_id))
    if found is None:
        return _missing(request, f"group {group_id}")
    texts = [conversation.text_of(member.answer) for member in found.members]
    best = texts[0] if texts else ""
    return page(
        request,
        "group.html",
        group=found,
        members=[
            (member, conversation.differing(text, best))
            for member, text in zip(found.members, texts, strict=True)
        ],
    )


@router.get("/trajectories/{trajectory_id:path}")
async def trajectory(
    trajectory_id: str, request: Request, gateway: Strop, said: Chosen = None
) -> HTMLResponse:
    """One episode, as a person reads it."""
    project = gateway.project
    traced = gateway.settings.langfuse.projects.get(project)

    def view(connection: Connection) -> tuple[views.TrajectoryPage | None, list[str]]:
        found = views.trajectory(connection, project, trajectory_id)
        if found is None or traced is None:
            return found, []
        traces = langfuse.traces(connection, project, trajectory_id)
        return found, [f"{traced.base_url}/trace/{trace}" for trace in traces]

    found, links = await _read(gateway, view)
    if found is None:
        return _missing(request, f"trajectory {trajectory_id}")
    turns = list(conversation.turns(found.trajectory.completions))
    return page(
        request,
        "trajectory.html",
        found=found,
        trajectory=found.trajectory,
        turns=turns[: views.TURNS],
        by_id={turn.completion.id: turn for turn in turns},
        more=max(0, len(turns) - views.TURNS),
        threads=max((turn.thread for turn in turns), default=0),
        said=said,
        langfuse=links,
    )


@router.get("/ui/tokens/{completion_id}/{choice}")
async def tokens(completion_id: str, choice: str, request: Request, gateway: Strop) -> HTMLResponse:
    """The tokens of one answer: a part of a page."""
    found = await _read(gateway, lambda c: queries.completion(c, gateway.project, completion_id))
    index = _whole(choice)
    answer = next((one for one in found.choices if one.index == index), None) if found else None
    if found is None or answer is None:
        return _missing(request, f"answer {completion_id}")
    served = gateway.publisher.catalog.policies.get((gateway.project, found.policy))
    base = served.base_model if served is not None else ""
    shown = await asyncio.to_thread(probability.tokens, answer, base)
    total = len(answer.token_ids or ())
    return page(request, "tokens.html", tokens=shown, total=total)


@router.get("/steps")
async def steps(
    request: Request,
    gateway: Strop,
    policy: Chosen = None,
    before: Chosen = None,
) -> HTMLResponse:
    """Optimiser steps, the newest first."""
    until = _whole(before)

    def view(connection: Connection) -> tuple[list[views.Row], list[str]]:
        found = views.step_list(connection, gateway.project, policy or None, until)
        return found, [row["name"] for row in queries.policies(connection, gateway.project)]

    found, names = await _read(gateway, view)
    return page(
        request,
        "steps.html",
        steps=found[: views.STEPS],
        more=len(found) > views.STEPS,
        names=names,
        chosen=policy or "",
        before=until,
    )


@router.get("/steps/{step_id}")
async def step(step_id: str, request: Request, gateway: Strop) -> HTMLResponse:
    """What one step consumed, and what came of it."""
    number = _whole(step_id)
    if number is None:
        return _missing(request, f"step {step_id}")
    found = await _read(gateway, lambda c: views.step(c, gateway.project, number))
    if found is None:
        return _missing(request, f"step {step_id}")
    metrics = found.step["metrics"] or {}
    seconds = metrics.get("seconds_by_phase") or {}
    return page(
        request,
        "step.html",
        step=found.step,
        groups=found.groups,
        more=found.more,
        metrics={k: v for k, v in metrics.items() if not isinstance(v, dict)},
        tables={
            k: v for k, v in metrics.items() if isinstance(v, dict) and k != "seconds_by_phase"
        },
        seconds=seconds,
        phases=charts.phases(f"Time per phase of step {step_id}", seconds),
    )


@router.get("/ui/live")
async def live(gateway: Strop) -> StreamingResponse:
    """Says whenever something that a page shows has changed."""

    async def ticks() -> AsyncIterator[bytes]:
        yield b"retry: 3000\n\n"
        before: tuple[Any, ...] | None = None
        idle = 0
        while not gateway.events.closing:
            try:
                now = await _read(gateway, lambda c: views.fingerprint(c, gateway.project))
            except Exception:
                now = before or ()
            if before is not None and now != before:
                yield b"event: changed\ndata: {}\n\n"
                idle = 0
            before, idle = now, idle + 1
            if idle % 8 == 0:
                yield b": still there\n\n"
            await asyncio.sleep(_LIVE_SECONDS)

    headers = {**HEADERS, "x-accel-buffering": "no"}
    return StreamingResponse(ticks(), media_type="text/event-stream", headers=headers)


@router.get("/ui/static/{name}")
async def static(name: str) -> Response:
    """Scripts and styles, all from this machine."""
    path = _STATIC.get(name)
    if path is None:
        return Response(status_code=404)
    headers = {"cache-control": "public, max-age=3600", "x-content-type-options": "nosniff"}
    return FileResponse(path, headers=headers)
