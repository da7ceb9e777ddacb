"""uvicorn's HTTP/1.1 protocol, with an answer's head and body in one piece.

uvicorn hands the head and every part of the body to the transport one by one, and uvloop makes a
system call of each at once. What is written in one turn of the event loop goes out together here:
for a JSON answer that is one system call, and one waking of the client, instead of two.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST = 1 << 16
"""Bytes that wait for the turn's end; with more, the transport may ask the writer to pause."""


class Protocol(HttpToolsProtocol):
    """For `uvicorn --http gateway.protocol:Protocol`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(cast(asyncio.Transport, Joined(transport, self.loop)))


class Joined:
    """A transport that writes at the end of the loop's turn."""

    __slots__ = ("_loop", "_pieces", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Send bytes, in this turn of the loop."""
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _MOST:
            self._flush()

    def close(self) -> None:
        """Hang up when everything has been sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if pieces:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
