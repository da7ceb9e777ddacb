"""`POST /v1/rewards`: one reward or a list, all or nothing."""

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.responses import Response

from gateway.api import ids
from gateway.errors import ApiError, invalid, json_response, not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import queries, rewards
from gateway.store.records import StoredReward
from gateway.store.writer import QueueFull

router = APIRouter(tags=["rewards"])
Strop = Annotated[Gateway, Depends(gateway_of)]

_MOST = 10_000


class RewardBody(BaseModel):
    """A reward against a completion (and one of its choices), or against a trajectory."""

    model_config = ConfigDict(extra="forbid")

    reward: float = Field(strict=True, allow_inf_nan=False)
    completion_id: str | None = None
    choice: int | None = Field(default=None, ge=0, strict=True)
    trajectory_id: str | None = None
    name: str = Field(default="reward", min_length=1, max_length=256)
    comment: str | None = None
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=256)

    @model_validator(mode="after")
    def _one_target(self) -> "RewardBody":
        if (self.completion_id is None) == (self.trajectory_id is None):
            raise ValueError("name either completion_id or trajectory_id, and not both")
        if self.choice is not None and self.completion_id is None:
            raise ValueError("choice goes with completion_id")
        return self

    def new(self) -> rewards.NewReward:
        """The same, for the store."""
        target = self.completion_id and ids.completion_id(self.completion_id)
        return rewards.NewReward(**{**self.model_dump(), "completion_id": target})


# Told apart by their JSON type, so that an error names the field of the one that was meant.
OneOrMore = Annotated[
    Annotated[RewardBody, Tag("as:reward")] | Annotated[list[RewardBody], Tag("as:list")],
    Discriminator(lambda value: "as:list" if isinstance(value, list) else "as:reward"),
]


def reward_json(reward: StoredReward) -> dict[str, Any]:
    """A reward as the API shows it."""
    return {"object": "reward", **asdict(reward)}


def accepted_json(reward: rewards.NewReward) -> dict[str, Any]:
    """A reward that is kept, and whose target could not be looked for yet.

    Nor could its idempotency key: if that was used before, the reward and id of then stand.
    """
    shown = asdict(reward)
    del shown["idempotency_key"]
    return {"object": "reward", **shown, "verified": False}


@router.post(
    "/v1/rewards",
    status_code=201,
    responses={
        200: {"description": "Idempotent repeat: the first result"},
        202: {"description": "Kept while the database is away, and checked when it is back"},
    },
)
async def post_rewards(body: Annotated[OneOrMore, Body()], gateway: Strop) -> Response:
    """Store rewards. They count as soon as this answers, and as long as the completion is kept."""
    items = body if isinstance(body, list) else [body]
    if not items:
        raise invalid("The list of rewards is empty.")
    if len(items) > _MOST:
        raise invalid(f"At most {_MOST} rewards go into one call; this has {len(items)}.")
    posted = [item.new() for item in items]
    many = isinstance(body, list)
    try:
        result = await gateway.writer.post_rewards(gateway.project, posted)
    except rewards.UnknownTarget as error:
        raise ApiError(
            404,
            f"No completion, choice or trajectory for {error.param} {error.name!r}. "
            "Nothing was stored; use the id of a response, or its x-strop-trajectory header.",
            param=_place(many, error.index, error.param),
            code="not_found",
        ) from None
    except rewards.IdempotencyConflict as error:
        raise ApiError(
            409,
            f"The idempotency_key {error.key!r} was used with another body. Nothing was stored; "
            "use a new key for a new reward.",
            param=_place(many, error.index, "idempotency_key"),
            code="idempotency_conflict",
        ) from None
    except QueueFull as error:
        raise ApiError(429, f"{error}. Try again in a second.", retry_after=1) from None
    if result is None:
        shown, status = [accepted_json(reward) for reward in posted], 202
    else:
        stored, fresh = result
        shown, status = [reward_json(reward) for reward in stored], 201 if fresh else 200
    return json_response({"object": "list", "data": shown} if many else shown[0], status)


def _place(many: bool, index: int, field: str) -> str:
    return f"[{index}].{field}" if many else field


@router.get("/v1/rewards")
async def list_rewards(
    gateway: Strop,
    completion_id: Annotated[str | None, Query()] = None,
    trajectory_id: Annotated[str | None, Query()] = None,
) -> dict[str, Any]:
    """The rewards of a completion or a trajectory, oldest first."""
    if (completion_id is None) == (trajectory_id is None):
        raise invalid("Name either completion_id or trajectory_id.", "completion_id")
    completion_id = completion_id and ids.completion_id(completion_id)

    def read() -> list[StoredReward] | None:
        with gateway.database.read() as connection:
            if trajectory_id is not None:
                if queries.trajectory_place(connection, gateway.project, trajectory_id, "") is None:
                    return None
            elif queries.completion(connection, gateway.project, str(completion_id)) is None:
                return None
            return queries.rewards_of(connection, gateway.project, trajectory_id, completion_id)

    found = await asyncio.to_thread(read)
    if found is None:
        what = "trajectory" if trajectory_id is not None else "completion"
        name = str(trajectory_id or completion_id)
        raise not_found(what, name, "Use the id of a response.")
    return {"object": "list", "data": [reward_json(reward) for reward in found]}
