"""`GET /v1/groups`: what waits for training, what was trained on, and why not."""

import asyncio
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection, func, update

from gateway.errors import not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import group_view, queries
from gateway.store.models import Group
from gateway.store.readiness import with_states

router = APIRouter(tags=["groups"])
Strop = Annotated[Gateway, Depends(gateway_of)]


@router.get("/v1/groups")
async def list_groups(
    gateway: Strop,
    policy: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[
        float | None, Query(description="Only groups that were last active before this time")
    ] = None,
) -> dict[str, Any]:
    """Groups, the most recently active first."""

    def read() -> list[queries.GroupSummary]:
        now = time.time()
        with gateway.database.read() as connection:
            found = queries.groups(
                connection, gateway.project, policy, now=now, limit=limit, before=before
            )
            return with_states(found, queries.policies(connection, gateway.project), now)

    found = await asyncio.to_thread(read)
    return {
        "object": "list",
        "data": [{"object": "group", **asdict(group)} for group in found],
        "has_more": len(found) == limit,
    }


@router.get("/v1/groups/{group_id:path}")
async def retrieve_group(
    group_id: str,
    gateway: Strop,
    policy: Annotated[str | None, Query(description="If two have groups of this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=256)] = 32,
) -> dict[str, Any]:
    """A group with its members side by side, those that were worth most first."""

    def read() -> group_view.GroupView | None:
        with gateway.database.read() as connection:
            return group_view.view(connection, gateway.project, group_id, policy, limit)

    found = await asyncio.to_thread(read)
    if found is None:
        raise not_found("group", group_id, "GET /v1/groups lists them.")
    shown = asdict(found)
    del shown["project"]
    return {"object": "group", **shown}


@router.post("/v1/groups/{group_id:path}/close")
async def close_group(
    group_id: str,
    gateway: Strop,
    policy: Annotated[
        str | None, Query(description="If two have groups of this id; without it all of them.")
    ] = None,
) -> dict[str, Any]:
    """Nothing more will come: train on what has a reward.

    It stays closed: what comes all the same is taken as it is, and a reward that comes later still
    is a revision. Closing it again changes nothing.
    """
    change = (
        update(Group)
        .where(Group.project == gateway.project, Group.id == group_id)
        .values(closed_at=func.coalesce(Group.closed_at, time.time()))
    )
    if policy is not None:
        change = change.where(Group.policy == policy)

    def close(connection: Connection) -> int:
        return connection.execute(change).rowcount

    if not await gateway.writer.run(close):
        raise not_found("group", group_id, "GET /v1/groups lists them.")
    return {"object": "group", "id": group_id, "closed": True}
