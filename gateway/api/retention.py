"""`/v1/retention`: for how long the log of the key's project is kept."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.stored import write
from gateway.gateway import Gateway, gateway_of
from gateway.store import retention

router = APIRouter(tags=["retention"])
Strop = Annotated[Gateway, Depends(gateway_of)]

_MOST_DAYS = 36_500


class Rule(BaseModel):
    """How long a trajectory is kept."""

    model_config = ConfigDict(extra="forbid")

    days: Annotated[float, Field(gt=0, le=_MOST_DAYS)] | None = Field(
        description="Days after its last completion or reward at which a trajectory is deleted. "
        "null: never."
    )


async def _shown(gateway: Gateway) -> dict[str, Any]:
    def read() -> dict[str, float | None]:
        with gateway.database.read() as connection:
            return retention.read_all(connection)

    rules, project, settings = await asyncio.to_thread(read), gateway.project, gateway.settings
    own = project in rules
    default = settings.project_retention_days.get(project, settings.retention_days)
    return {
        "object": "retention",
        "days": rules[project] if own else default,
        "source": "project" if own else "settings",
        "default_days": default,
    }


@router.get("/v1/retention")
async def retrieve_retention(gateway: Strop) -> dict[str, Any]:
    """The project's rule, and whether it is its own or that of the gateway's settings."""
    return await _shown(gateway)


@router.put("/v1/retention")
async def set_retention(body: Rule, gateway: Strop) -> dict[str, Any]:
    """Give the project a rule of its own; what is older by then is deleted within the hour."""
    await write(gateway, lambda connection: retention.keep(connection, gateway.project, body.days))
    return await _shown(gateway)


@router.delete("/v1/retention")
async def reset_retention(gateway: Strop) -> dict[str, Any]:
    """Give the project the rule of the settings again."""
    await write(gateway, lambda connection: retention.forget(connection, gateway.project))
    return await _shown(gateway)
