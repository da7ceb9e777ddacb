"""`/v1/replicas`: which vLLM servers there are, what is where, and taking one out of use."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from gateway.api.stored import write
from gateway.backends.vllm import Replica
from gateway.errors import ApiError, not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import drains
from gateway.store.models import DEFAULT_PROJECT

router = APIRouter(tags=["replicas"])
Strop = Annotated[Gateway, Depends(gateway_of)]


def replica_json(gateway: Gateway, replica: Replica) -> dict[str, Any]:
    """A replica as the API shows it: of other projects' policies there is nothing in it."""
    served = gateway.publisher.catalog.of(gateway.project)
    mine = {name: f"{p.name}@{n}" for p in served for n, name in p.loaded.items()}
    return {
        "object": "replica",
        "name": replica.url.partition("://")[2],
        "url": replica.url,
        "source": replica.source,
        "state": gateway.pool.state(replica),
        "healthy": replica.healthy,
        "error": replica.error or replica.ejection.error,
        "failures": replica.ejection.failures,
        "in_flight": replica.in_flight,
        "serves": sorted(shown for name, shown in mine.items() if name in replica.proven),
    }


def _named(gateway: Gateway, name: str) -> Replica:
    for replica in gateway.pool.replicas:
        if name in (replica.url, replica.url.partition("://")[2]):
            return replica
    raise not_found("replica", name, "GET /v1/replicas lists them.")


def _operator(gateway: Gateway) -> None:
    if gateway.project != DEFAULT_PROJECT:
        raise ApiError(
            403,
            "Replicas serve all projects, so taking one out of use needs a key with the scope "
            f"admin of the project {DEFAULT_PROJECT}, or STROP_ADMIN_KEY.",
            code="insufficient_scope",
        )


@router.get("/v1/replicas")
async def list_replicas(gateway: Strop) -> dict[str, Any]:
    """All replicas, as this gateway sees them."""
    found = [replica_json(gateway, replica) for replica in gateway.pool.replicas]
    return {"object": "list", "data": found}


@router.post("/v1/replicas/{name}/drain")
async def drain_replica(name: str, gateway: Strop) -> dict[str, Any]:
    """Give a replica no new requests, from any gateway; what it has begun it ends."""
    _operator(gateway)
    replica = _named(gateway, name)
    await write(gateway, lambda connection: drains.drain(connection, replica.url))
    gateway.pool.drain(replica.url, out=True)
    gateway.publisher.poke()
    return replica_json(gateway, replica)


@router.post("/v1/replicas/{name}/resume")
async def resume_replica(name: str, gateway: Strop) -> dict[str, Any]:
    """Use a replica again; what it serves is known to requests when this answers."""
    _operator(gateway)
    replica = _named(gateway, name)
    await write(gateway, lambda connection: drains.resume(connection, replica.url))
    gateway.pool.drain(replica.url, out=False)
    await gateway.publisher.reconcile()
    return replica_json(gateway, replica)
