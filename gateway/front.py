"""The application, with a short way in for its hot path.

A request that FastAPI routes passes through its middleware, its router and Starlette's, which costs
more than all that strop does with it (see docs/measurements.md). Requests for completions go to
their endpoint straight away: authenticated, scope-checked, and with errors answered, as the
framework's way would. Every other request takes that way.
"""

import re
from collections.abc import Mapping
from contextlib import suppress

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth import authenticate, refusal
from gateway.errors import ApiError, database_error, unexpected
from gateway.telemetry.observation import Tell, observed

_ROLLOUT = re.compile(r"/rollouts/(?P<group>[^/]+)/(?P<trajectory>[^/]+)(?P<path>/v1/.+)")

_TOO_MANY = ApiError(
    429,
    "As many requests are being answered as this gateway takes at once (max_requests). Try again "
    "in a second.",
    code="too_many_requests",
    retry_after=1,
)


class Strop(FastAPI):
    """FastAPI, but for the paths in `hot`.

    A middleware that is added to the application does not see those: what must hold for them is
    to be called here, or in `gateway.api.endpoint`.
    """

    hot: Mapping[str, ASGIApp] = {}
    """Endpoints by path, all for POST alone."""

    tell: Tell | None = None
    """What is told of every request when it is over."""

    most: int = 1024
    """Requests of the hot path that are answered at once."""

    in_flight: int = 0
    """Those that are being answered now."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if self.tell is None or scope["type"] != "http":
            await self._serve(scope, receive, send)
        else:
            await observed(self._serve, self.tell, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            await super().__call__(scope, receive, send)
            return
        path, names = scope["path"], {}
        if path.startswith("/rollouts/"):
            match = _ROLLOUT.fullmatch(path)
            if match is not None:
                names, path = match.groupdict(), match["path"]
        endpoint = self.hot.get(path)
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"], scope["path_params"] = self, names
        scope["endpoint"] = endpoint
        try:
            await authenticate(scope, "inference")
        except ApiError as error:
            await refusal(error, path)(scope, receive, send)
            return
        except Exception as error:
            await _failed(error, scope, receive, send)
            return
        if self.in_flight >= self.most:
            await refusal(_TOO_MANY, path)(scope, receive, send)
            return
        self.in_flight += 1
        try:
            await _answered(endpoint, scope, receive, send)
        finally:
            self.in_flight -= 1


async def _answered(endpoint: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        await endpoint(scope, receive, send)
    except ApiError as error:
        await error.response()(scope, receive, send)
    except Exception as error:
        await _failed(error, scope, receive, send)


async def _failed(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    response = database_error(error)
    if response is not None:
        await response(scope, receive, send)
        return
    # RuntimeError: the answer had begun. All that is left is to cut it off.
    with suppress(RuntimeError):
        await unexpected(error)(scope, receive, send)
    # The server logs it.
    raise error
