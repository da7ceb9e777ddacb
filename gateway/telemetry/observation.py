"""What one request did, noted while it runs and told once at its end.

It begins before everything else, so that a refused request counts too. The hot path
says one thing to it: which completion it stores. Nothing here reads a body or a header's value,
but for `traceparent`.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.store.records import CapturedCompletion

CLIENT_GONE = 499
"""Status of a request whose client hung up before it had an answer; nginx's number."""


@dataclass(slots=True)
class Observation:
    """One request. Times are Unix seconds."""

    scope: Scope
    began: float
    status: int = 0
    ended: float = 0.0
    captured: CapturedCompletion | None = None
    committed: float = 0.0
    """When its completion was durable; 0 if it never was."""

    @property
    def project(self) -> str:
        """The project of its key; empty if it was refused."""
        principal = self.scope.get("state", {}).get("principal")
        return principal.project if principal is not None else ""


_CURRENT: ContextVar[Observation | None] = ContextVar("strop_observation", default=None)


def storing(captured: CapturedCompletion) -> Observation | None:
    """Tell the request that is being served which completion it is about to store."""
    seen = _CURRENT.get()
    if seen is not None:
        seen.captured = captured
    return seen


Tell = Callable[[Observation], None]


async def observed(app: ASGIApp, tell: Tell, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve an HTTP request with `app`, and tell what it did when it is over."""
    seen = Observation(scope, time.time())
    token = _CURRENT.set(seen)

    async def observed_send(message: Message) -> None:
        if message["type"] == "http.response.start":
            seen.status = message["status"]
        await send(message)

    try:
        await app(scope, receive, observed_send)
    except Exception:
        # Where nothing was sent, the server answers for us.
        seen.status = seen.status or 500
        raise
    finally:
        _CURRENT.reset(token)
        seen.status = seen.status or CLIENT_GONE
        seen.ended = time.time()
        tell(seen)
