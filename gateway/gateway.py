"""The parts that requests share; built once by `gateway.app`."""

from dataclasses import dataclass

from starlette.requests import Request

from gateway.backends.vllm import ReplicaPool
from gateway.capture.placement import Placements
from gateway.capture.retries import Retries
from gateway.publisher import Publisher
from gateway.settings import Settings
from gateway.store import Database
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.writer import Writer


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
    project: str = DEFAULT_PROJECT


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to; a FastAPI dependency."""
    gateway: Gateway = request.app.state.gateway
    return gateway
