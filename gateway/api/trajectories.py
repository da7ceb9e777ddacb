"""`GET` and `DELETE /v1/trajectories/{id}`: an episode, whole."""

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from gateway import retention
from gateway.api.completions import completion_json
from gateway.api.rewards import reward_json
from gateway.api.stored import ForgetUses, deleted_json, write
from gateway.errors import ApiError, not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import deletion, queries
from gateway.store.records import StoredCompletion, StoredTrajectory

router = APIRouter(tags=["trajectories"])
Strop = Annotated[Gateway, Depends(gateway_of)]


def _turn(completion: StoredCompletion, tokens: bool) -> dict[str, Any]:
    turn = completion_json(completion, [])
    del turn["strop"]["rewards"]
    turn["messages"] = completion.messages
    if tokens:
        turn["prompt_token_ids"] = completion.prompt_ids
        turn["tokens"] = [
            {"index": c.index, "token_ids": c.token_ids, "logprobs": c.logprobs}
            for c in completion.choices
        ]
    return turn


def trajectory_json(trajectory: StoredTrajectory, tokens: bool) -> dict[str, Any]:
    """A trajectory as the API shows it."""
    return {
        "id": trajectory.id,
        "object": "trajectory",
        "policy": trajectory.policy,
        "group_id": trajectory.group_id,
        "parent_id": trajectory.parent_id,
        "split": trajectory.split,
        "attribution": trajectory.attribution,
        "state": trajectory.state,
        "reason": trajectory.reason,
        "step_id": trajectory.step_id,
        "created_at": trajectory.created_at,
        "updated_at": trajectory.updated_at,
        "rewards": [reward_json(reward) for reward in trajectory.rewards],
        "completions": [_turn(completion, tokens) for completion in trajectory.completions],
    }


@router.get("/v1/trajectories/{trajectory_id:path}")
async def retrieve_trajectory(
    trajectory_id: str, gateway: Strop, tokens: Annotated[bool, Query()] = False
) -> dict[str, Any]:
    """One trajectory; with `tokens=true` the exact token ids and logprobs too."""

    def read() -> StoredTrajectory | None:
        with gateway.database.read() as connection:
            return queries.trajectory(connection, gateway.project, trajectory_id)

    found = await asyncio.to_thread(read)
    if found is None:
        raise _unknown(trajectory_id)
    return trajectory_json(found, tokens)


@router.delete("/v1/trajectories")
async def delete_old_trajectories(
    gateway: Strop,
    before: Annotated[
        float,
        Query(
            allow_inf_nan=False,
            description="Unix seconds. A completion or a reward that came later keeps its "
            "trajectory.",
        ),
    ],
    forget_uses: ForgetUses = False,
) -> dict[str, Any]:
    """Delete all trajectories in which nothing happened since a time; some at a time.

    A client that breaks off can ask again.
    """
    return deleted_json(
        await retention.delete_before(
            partial(write, gateway), gateway.project, before, forget_uses=forget_uses
        )
    )


@router.delete("/v1/trajectories/{trajectory_id:path}")
async def delete_trajectory(
    trajectory_id: str, gateway: Strop, forget_uses: ForgetUses = False
) -> dict[str, Any]:
    """Delete a trajectory with its completions and rewards."""
    deleted = await write(
        gateway,
        lambda connection: deletion.delete_trajectories(
            connection, gateway.project, [trajectory_id], forget_uses=forget_uses
        ),
    )
    if not deleted.trajectories:
        raise _unknown(trajectory_id)
    return {
        "id": trajectory_id,
        "object": "trajectory.deleted",
        "deleted": True,
        "completions": deleted.completions,
    }


def _unknown(trajectory_id: str) -> ApiError:
    return not_found("trajectory", trajectory_id, "A response names its own in x-strop-trajectory.")
