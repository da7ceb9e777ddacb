"""What a request's model name means, also where another process has only just made it so.

Each process has a catalog of its own, which is as old as its last look at the database and the
replicas. A name that is not in it may yet exist, and then the client has to come again, and must
not be told that there is no such model.
"""

import asyncio

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from gateway.catalog import ServedPolicy, split_version
from gateway.errors import ApiError
from gateway.gateway import Gateway
from gateway.store import queries


async def find_model(gateway: Gateway, model: str) -> tuple[ServedPolicy, int | None]:
    """The policy of a model name, and the version if the name pins one.

    Raises:
        ApiError: 404, there is none; 503, this process has yet to see it.
    """
    try:
        return gateway.publisher.catalog.find(gateway.project, model)
    except ApiError as missing:
        raise await unless_new(gateway, model, missing) from None


async def unless_new(gateway: Gateway, model: str, missing: ApiError) -> ApiError:
    """The error for a name that the catalog does not have: `missing`, or to come again."""
    if missing.status != 404:
        return missing
    try:
        exists = await asyncio.to_thread(_exists, gateway, model)
    except SQLAlchemyError:
        return missing
    if not exists:
        return missing
    gateway.publisher.poke()
    return ApiError(
        503,
        f"{model!r} was made just now, and is not served here yet. Try again in a second; if it "
        "lasts, GET /readyz says what is missing.",
        code="model_not_ready",
        retry_after=1,
    )


def _exists(gateway: Gateway, model: str) -> bool:
    with gateway.database.read() as connection:
        if queries.policy(connection, gateway.project, model) is not None:
            return True
        name, number = split_version(model)
        return number is not None and _is_served(connection, gateway.project, name, number)


def _is_served(connection: Connection, project: str, name: str, number: int) -> bool:
    policy = queries.policy(connection, project, name)
    version = queries.version(connection, project, name, number)
    if policy is None or version is None:
        return False
    return version["state"] == "serving" or number in (policy["alias"], policy["canary"])
