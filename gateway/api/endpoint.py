"""A route that takes a JSON object, without what a framework adds to each request."""

from abc import ABC, abstractmethod
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.capture.request import parse_body
from gateway.gateway import Gateway, gateway_in
from gateway.http import ClientGone, read_body


class JsonEndpoint(ABC):
    """A plain ASGI application; errors go to the handlers of the application it is mounted in."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read one request and answer it."""
        gateway = gateway_in(scope)
        try:
            raw = await read_body(receive, gateway.settings.max_body_bytes)
        except ClientGone:
            return
        await self.answer(gateway, parse_body(raw), scope, receive, send)

    @abstractmethod
    async def answer(
        self, gateway: Gateway, body: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request whose body has been read."""
