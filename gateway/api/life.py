"""`/v1/policies/{name}/…`: forking, pausing, resuming, trials, and what happened when."""

import asyncio
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.policies import NAME, find_policy, policy_json
from gateway.errors import ApiError, invalid, not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import queries, trials

router = APIRouter(tags=["policies"])
Strop = Annotated[Gateway, Depends(gateway_of)]

Json = dict[str, Any]


class Fork(BaseModel):
    """A new policy out of a version."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0)
    name: str = Field(pattern=NAME)
    """Of the new policy."""


class Pause(BaseModel):
    """Why training stops."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="paused by command", min_length=1, max_length=1000)


class Resume(BaseModel):
    """How training goes on."""

    model_config = ConfigDict(extra="forbid")

    rate_factor: float | None = Field(default=None, gt=0)
    """What the settings' learning rate is multiplied with from now on; the guard lowers it."""


class Trial(BaseModel):
    """Which version is promoted or dropped."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(default=None, ge=0)
    """The one on trial, for those who want to be sure which that is."""


async def _changed(gateway: Gateway, name: str) -> Json:
    await gateway.publisher.reconcile()
    return policy_json(await find_policy(gateway, name), gateway)


@router.post("/v1/policies/{name}/fork", status_code=201)
async def fork(name: str, body: Fork, gateway: Strop) -> Json:
    """Make a new policy whose version 0 is a version of this one; optimiser and all."""
    await find_policy(gateway, name)
    project = gateway.project

    def read() -> tuple[queries.Row | None, bool]:
        with gateway.database.read() as connection:
            found = queries.version(connection, project, name, body.version)
            return found, queries.policy(connection, project, body.name) is not None

    version, taken = await asyncio.to_thread(read)
    if version is None:
        known = f"GET /v1/policies/{name}/versions lists them."
        raise not_found("version", f"{name}@{body.version}", known)
    if version["deleted_at"] is not None:
        raise ApiError(
            409,
            f"The files of {name}@{body.version} are deleted; fork one that is kept.",
            param="version",
            code="version_deleted",
        )
    exists = ApiError(
        409, f"There is a policy {body.name!r} already.", param="name", code="policy_exists"
    )
    if taken:
        raise exists
    source = version["adapter_path"]
    target: Path | None = None
    if source is not None:
        target = gateway.settings.artifacts() / project / body.name / "000000-fork"
        try:
            await asyncio.to_thread(_copy, Path(source), target)
        except OSError as error:
            raise ApiError(
                503, f"The files of {name}@{body.version} cannot be copied: {error}."
            ) from error
    made = await gateway.writer.run(
        lambda c: trials.forked(
            c, project, name, body.version, body.name, str(target) if target else None
        )
    )
    if not made:
        raise exists
    return await _changed(gateway, body.name)


def _copy(source: Path, target: Path) -> None:
    """Copy a version's folder, whole or not at all."""
    if target.exists():
        # Left by a fork that did not get as far as the database.
        shutil.rmtree(target)
    partial = target.with_name(f".partial-{target.name}-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, partial)
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@router.post("/v1/policies/{name}/pause")
async def pause(name: str, gateway: Strop, body: Pause | None = None) -> Json:
    """Take no more steps; a step that is running is finished. Serving goes on."""
    await find_policy(gateway, name)
    reason = (body or Pause()).reason
    await gateway.writer.run(lambda c: trials.paused(c, gateway.project, name, reason))
    return await _changed(gateway, name)


@router.post("/v1/policies/{name}/resume")
async def resume(name: str, gateway: Strop, body: Resume | None = None) -> Json:
    """Take steps again."""
    await find_policy(gateway, name)
    factor = (body or Resume()).rate_factor
    await gateway.writer.run(lambda c: trials.resumed(c, gateway.project, name, factor))
    return await _changed(gateway, name)


async def _on_trial(gateway: Gateway, name: str, version: int | None) -> int:
    canary: int | None = (await find_policy(gateway, name))["canary"]
    if canary is None:
        raise ApiError(
            409,
            f"No version of {name} is on trial. Set policies.{name}.canary.share for trials; "
            f"POST /v1/policies/{name}/rollback serves a version that was served before.",
            code="no_trial",
        )
    if version not in (None, canary):
        raise invalid(f"{name}@{version} is not on trial, {name}@{canary} is.", "version")
    return canary


@router.post("/v1/policies/{name}/promote")
async def promote(name: str, gateway: Strop, body: Trial | None = None) -> Json:
    """End the trial: the version on trial serves everybody."""
    number = await _on_trial(gateway, name, (body or Trial()).version)
    why = f"{name}@{number} is promoted by command"
    await gateway.writer.run(lambda c: trials.promoted(c, gateway.project, name, number, why, {}))
    return await _changed(gateway, name)


@router.post("/v1/policies/{name}/drop")
async def drop(name: str, gateway: Strop, body: Trial | None = None) -> Json:
    """End the trial: the version on trial serves nobody, and training goes on from the alias."""
    number = await _on_trial(gateway, name, (body or Trial()).version)
    why = f"{name}@{number} is dropped by command"
    await gateway.writer.run(lambda c: trials.dropped(c, gateway.project, name, number, why, {}))
    return await _changed(gateway, name)


@router.get("/v1/policies/{name}/events")
async def list_events(
    name: str,
    gateway: Strop,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: int | None = None,
) -> Json:
    """What happened to a policy, the newest first; `before` is the id of the last one seen."""
    await find_policy(gateway, name)

    def read() -> list[Json]:
        with gateway.database.read() as connection:
            return trials.events(connection, gateway.project, name, limit, before)

    rows = await asyncio.to_thread(read)
    shown = ("id", "kind", "version", "detail", "at")
    return {
        "object": "list",
        "data": [{"object": "event", **{key: row[key] for key in shown}} for row in rows],
    }
