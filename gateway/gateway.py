"""The parts that requests share; built once by `gateway.app`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.types import Scope

from gateway.auth import EVERYTHING, Principal
from gateway.backends.vllm import ReplicaPool
from gateway.capture.placement import Placements
from gateway.capture.retries import Retries
from gateway.events import EventHub
from gateway.publisher import Publisher
from gateway.settings import Settings
from gateway.store import Database
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.writer import Writer
from gateway.webhooks import Delivery


@dataclass(slots=True)
class Gateway:
    """What a request handler may use."""

    settings: Settings
    database: Database
    writer: Writer
    pool: ReplicaPool
    publisher: Publisher
    placements: Placements
    retries: Retries
    events: EventHub
    deliveries: Sequence[Delivery] = ()
    project: str = DEFAULT_PROJECT


def gateway_in(scope: Scope) -> Gateway:
    """The gateway that a request came to, seen from the project of its key."""
    gateway: Gateway = scope["app"].state.gateway
    # /healthz and /readyz are open to everybody.
    principal: Principal = scope.get("state", {}).get("principal", EVERYTHING)
    if principal.project == gateway.project:
        return gateway
    return replace(gateway, project=principal.project)


def gateway_of(request: Request) -> Gateway:
    """The same, as a FastAPI dependency."""
    return gateway_in(request.scope)
