"""The few pieces of ASGI that the hot path handles itself."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message, Receive, Send

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


async def unless_hung_up(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`; cancel it if the client hangs up first. True if it ran to its end.

    `work` sees `asyncio.CancelledError` at the point where it waits, and may still tidy up.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True
    finally:
        watcher.cancel()
        # The server is shutting down: `work` is told, and waited for.
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def send_start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """The status line and the headers."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, body: bytes, *, more: bool = False) -> None:
    """A part of the body."""
    await send({"type": "http.response.body", "body": body, "more_body": more})
