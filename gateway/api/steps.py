"""`/v1/policies/{name}/steps` and `/v1/steps/{id}`: what was learned from, step by step."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from gateway.api.policies import find_policy
from gateway.errors import not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import steps

router = APIRouter(tags=["steps"])
Strop = Annotated[Gateway, Depends(gateway_of)]

Json = dict[str, Any]


@router.get("/v1/policies/{name}/steps")
async def list_steps(
    name: str,
    gateway: Strop,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: int | None = None,
) -> Json:
    """The steps of a policy, the newest first; `before` is the id of the last one seen."""
    await find_policy(gateway, name)

    def read() -> list[Json]:
        with gateway.database.read() as connection:
            return steps.of_policy(connection, gateway.project, name, limit, before)

    rows = await asyncio.to_thread(read)
    return {"object": "list", "data": [_shown(row) for row in rows]}


@router.get("/v1/steps/{step_id}")
async def retrieve_step(step_id: int, gateway: Strop) -> Json:
    """A step with every completion that it used, and the reason of every one that it did not."""

    def read() -> tuple[Json | None, list[Json]]:
        with gateway.database.read() as connection:
            found = steps.step(connection, gateway.project, step_id)
            return found, steps.uses(connection, step_id) if found else []

    row, uses = await asyncio.to_thread(read)
    if row is None:
        raise not_found("step", str(step_id), "GET /v1/policies/{name}/steps lists them.")
    return {**_shown(row), "config": row["config"], "uses": uses}


def _shown(row: Json) -> Json:
    hidden = ("project", "config")
    return {"object": "step", **{key: value for key, value in row.items() if key not in hidden}}
