"""What the pages show, read from the database. Everything here blocks, and is short."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from gateway.dashboard.charts import Point, Series
from gateway.store import events, group_view, queries, steps
from gateway.store.events import StoredEvent
from gateway.store.models import Completion, CompletionUse, Event, Reward, Step, Trajectory
from gateway.store.readiness import with_states
from gateway.store.records import StoredTrajectory
from gateway.store.statistics import VersionReward

Row = dict[str, Any]

GROUPS = 40
STEPS = 40
VERSIONS = 60
TURNS = 200
USES = 400
_MINUTES = 60


@dataclass(slots=True)
class Overview:
    """The front page."""

    policies: list[Row]
    groups: list[queries.GroupSummary]
    events: list[StoredEvent]
    steps: dict[str, Row]
    """The newest step of each policy."""


def overview(connection: Connection, project: str) -> Overview:
    """What there is, newest first."""
    policies = queries.policies(connection, project)
    newest = {}
    for policy in policies:
        found = steps.of_policy(connection, project, policy["name"], 1)
        if found:
            newest[policy["name"]] = found[0]
    now = time.time()
    return Overview(
        policies,
        with_states(queries.groups(connection, project, now=now, limit=12), policies, now),
        events.latest(connection, project, limit=8),
        newest,
    )


def traffic(connection: Connection, project: str) -> list[int]:
    """Completions of each of the last 60 minutes, the newest last."""
    began = (int(time.time()) // 60 - _MINUTES + 1) * 60
    minute = func.floor((Completion.created_at - began) / 60)
    query = (
        select(minute, func.count())
        .where(Completion.project == project, Completion.created_at >= began)
        .group_by(minute)
    )
    counts = [0] * _MINUTES
    for index, count in connection.execute(query):
        if 0 <= int(index) < _MINUTES:
            counts[int(index)] = count
    return counts


@dataclass(slots=True)
class PolicyPage:
    """One policy."""

    policy: Row
    versions: list[Row]
    """The newest first."""
    steps: list[Row]
    events: list[StoredEvent]


def policy(connection: Connection, project: str, name: str) -> PolicyPage | None:
    """A policy with its newest versions and steps."""
    row = queries.policy(connection, project, name)
    if row is None:
        return None
    return PolicyPage(
        row,
        queries.versions(connection, project, name)[::-1][:VERSIONS],
        steps.of_policy(connection, project, name, 100),
        events.latest(connection, project, policy=name, limit=15),
    )


def reward_series(rewards: Sequence[VersionReward]) -> list[Series]:
    """Training and held-out reward by version, with 95% intervals."""
    return [
        Series(
            name,
            kind,
            [
                Point(r.version, r.mean, 1.96 * r.standard_error if r.standard_error else None)
                for r in rewards
                if r.split == kind
            ],
        )
        for name, kind in (("training", "train"), ("held out", "eval"))
    ]


def by_version(rewards: Sequence[VersionReward]) -> list[tuple[int, dict[str, VersionReward]]]:
    """Version and its rewards by split, the newest first."""
    found: dict[int, dict[str, VersionReward]] = {}
    for reward in rewards:
        found.setdefault(reward.version, {})[reward.split] = reward
    return sorted(found.items(), reverse=True)


def metric_series(rows: Sequence[Row], key: str, name: str) -> list[Series]:
    """A metric of the steps, by the version that each made."""
    points = []
    for row in rows:
        value = (row["metrics"] or {}).get(key)
        if row["version"] is not None and isinstance(value, int | float):
            points.append(Point(row["version"], float(value)))
    return [Series(name, "train", points)]


@dataclass(slots=True)
class TrajectoryPage:
    """One episode and what belongs to it."""

    trajectory: StoredTrajectory
    rewards: list[Row]
    """All of them, the corrected and withdrawn ones too, newest first."""
    uses: list[Row]
    children: list[Row]
    parent: Row | None


def trajectory(connection: Connection, project: str, trajectory_id: str) -> TrajectoryPage | None:
    """An episode with its sub-agents."""
    found = queries.trajectory(connection, project, trajectory_id)
    if found is None:
        return None
    history = (
        select(Reward.__table__)
        .where(Reward.project == project, Reward.trajectory_id == trajectory_id)
        .order_by(Reward.row.desc())
    )
    rewards: list[Row] = []
    counted: set[tuple[Any, ...]] = set()
    for row in connection.execute(history).mappings():
        target = (row["completion_id"], row["choice"], row["name"])
        counts = row["withdrawn_at"] is None and target not in counted
        if row["withdrawn_at"] is None:
            counted.add(target)
        rewards.append({**row, "counts": counts})
    uses = (
        select(CompletionUse.__table__)
        .where(CompletionUse.trajectory_id == trajectory_id)
        .order_by(CompletionUse.row)
    )
    relatives = select(Trajectory.__table__).where(Trajectory.project == project)
    children = relatives.where(Trajectory.parent_id == trajectory_id).limit(100)
    parent = relatives.where(Trajectory.id == found.parent_id)
    above = connection.execute(parent).mappings().one_or_none() if found.parent_id else None
    ours = {completion.id for completion in found.completions}
    return TrajectoryPage(
        found,
        rewards,
        [dict(r) for r in connection.execute(uses).mappings() if r["completion_id"] in ours],
        [dict(row) for row in connection.execute(children).mappings()],
        dict(above) if above is not None else None,
    )


def step_list(
    connection: Connection, project: str, name: str | None, before: int | None
) -> list[Row]:
    """Steps, the newest first; one more than a page shows, if there is one."""
    query = select(Step.__table__).where(Step.project == project)
    if name is not None:
        query = query.where(Step.policy == name)
    if before is not None:
        query = query.where(Step.id < before)
    query = query.order_by(Step.id.desc()).limit(STEPS + 1)
    return [dict(row) for row in connection.execute(query).mappings()]


@dataclass(slots=True)
class StepPage:
    """One step and what it consumed, by group."""

    step: Row
    groups: dict[str, list[Row]]
    more: int


def step(connection: Connection, project: str, step_id: int) -> StepPage | None:
    """A step with its inputs."""
    found = steps.step(connection, project, step_id)
    if found is None:
        return None
    uses = steps.uses(connection, step_id)
    groups: dict[str, list[Row]] = {}
    for use in uses[:USES]:
        groups.setdefault(use["group_id"], []).append(use)
    return StepPage(found, groups, max(0, len(uses) - USES))


def group(
    connection: Connection, project: str, name: str, group_id: str
) -> group_view.GroupView | None:
    """The members of a group."""
    return group_view.view(connection, project, group_id, name, limit=24)


def fingerprint(connection: Connection, project: str) -> tuple[Any, ...]:
    """Something that differs after anything that a page shows has changed. Index reads alone."""
    newest = connection.execute(
        select(func.max(Completion.created_at)).where(Completion.project == project)
    ).scalar_one()
    reward = connection.execute(select(func.max(Reward.row))).scalar_one()
    event = connection.execute(select(func.max(Event.id))).scalar_one()
    last = connection.execute(
        select(Step.id, Step.state).order_by(Step.id.desc()).limit(1)
    ).one_or_none()
    return newest, reward, event, tuple(last) if last is not None else None
