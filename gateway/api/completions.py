"""`GET /v1/chat/completions/{id}`: OpenAI's call for a stored completion."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gateway.api import ids
from gateway.api.rewards import reward_json
from gateway.errors import not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import queries
from gateway.store.listing import ListedCompletion
from gateway.store.records import StoredCompletion, StoredReward

router = APIRouter(tags=["completions"])
Strop = Annotated[Gateway, Depends(gateway_of)]


def completion_json(
    completion: StoredCompletion | ListedCompletion, rewards: list[StoredReward]
) -> dict[str, Any]:
    """A completion as the client got it, and what strop knows of it under `strop`."""
    response = completion.response or {}
    error = response.get("error")
    shown: dict[str, Any] = {
        "id": completion.id,
        "object": "chat.completion",
        "created": int(completion.created_at),
        "model": f"{completion.policy}@{completion.version}",
        "choices": [],
        "usage": None,
        **({} if error else response),
        "metadata": completion.client_metadata or {},
    }
    shown["strop"] = {
        "trajectory_id": completion.trajectory_id,
        "parent_id": completion.parent_id,
        "policy": completion.policy,
        "version": completion.version,
        "status": completion.status,
        "http_status": completion.http_status,
        "error": error,
        "reason": completion.reason,
        "replica": completion.replica,
        "sampling": completion.sampling,
        "seconds": round(completion.finished_at - completion.created_at, 6),
        "rewards": [reward_json(reward) for reward in rewards],
    }
    return shown


@router.get("/v1/chat/completions/{completion_id}")
async def retrieve_completion(completion_id: str, gateway: Strop) -> dict[str, Any]:
    """One completion."""
    stored_id = ids.completion_id(completion_id)

    def read() -> dict[str, Any] | None:
        with gateway.database.read() as connection:
            found = queries.completion(connection, gateway.project, stored_id)
            if found is None:
                return None
            posted = queries.rewards_of(connection, gateway.project, None, stored_id)
            return completion_json(found, posted)

    found = await asyncio.to_thread(read)
    if found is None:
        raise not_found("completion", completion_id, "Use the id of a response.")
    return found
