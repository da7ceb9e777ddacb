"""`GET /v1/why/{id}`: why something was trained on, or was not, or not yet."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gateway.api.ids import completion_id
from gateway.errors import not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store.why import Why, why

router = APIRouter(tags=["why"])
Strop = Annotated[Gateway, Depends(gateway_of)]


@router.get("/v1/why/{id:path}")
async def explain(id: str, gateway: Strop) -> dict[str, Any]:
    """What became of a completion, trajectory or group, and what it waits for, in words."""

    def read() -> list[Why]:
        with gateway.database.read() as connection:
            return why(connection, gateway.project, completion_id(id)) or why(
                connection, gateway.project, id
            )

    found = await asyncio.to_thread(read)
    if not found:
        raise not_found(
            "completion",
            id,
            "Nor is there a trajectory or group of that id; that of a reply is its `id` field.",
        )
    return {"object": "list", "data": [{"object": "why", **asdict(each)} for each in found]}
