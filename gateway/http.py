"""The few pieces of ASGI that the hot path handles itself."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ApiError


class ClientGone(Exception):
    """The client hung up before its request was whole."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body.

    Raises:
        ApiError: 413, it is longer than `limit` bytes.
        ClientGone: there is nobody left to answer.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise ApiError(
                413,
                f"The body is larger than {limit} bytes. Send less, or raise STROP_MAX_BODY_BYTES.",
                code="body_too_large",
            )
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


_WATCHED_AFTER = 0.05
"""Seconds after which somebody looks whether the client is still there: most requests are answered
before, and a look costs a task."""


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`; cancel it if the client hangs up first. True if it ran to its end.

    `work` sees `asyncio.CancelledError` at the point where it waits, and may still tidy up.
    """
    task = asyncio.current_task()
    assert task is not None
    watch = _Watch(receive, task)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.hung_up or task.cancelling() > 1:
            # The server is shutting down.
            raise
        return False
    finally:
        watch.end()
    return True


class _Watch:
    """Cancels a task when the client hangs up. Until `end` the task waits inside its work, so that
    is where it is cancelled."""

    __slots__ = ("_receive", "_task", "_timer", "_watcher", "hung_up")

    def __init__(self, receive: Receive, task: "asyncio.Task[Any]"):
        self._receive = receive
        self._task = task
        self._watcher: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_WATCHED_AFTER, self._begin)
        self.hung_up = False

    def end(self) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self.hung_up:
            self._task.uncancel()

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        self.hung_up = True
        self._task.cancel()


def headers_of(scope: Scope) -> Mapping[str, str]:
    """The headers by their lower-case names; of several of one name the first."""
    known: dict[str, str] | None = scope.get("strop.headers")
    if known is None:
        known = scope["strop.headers"] = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
    return known


async def send_whole(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
) -> None:
    """A whole answer. Its length is told, so that the server need not cut it into chunks."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """The status line and the headers."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, body: bytes, *, more: bool = False) -> None:
    """A part of the body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
