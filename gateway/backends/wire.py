"""POST to a replica over plain HTTP/1.1 with kept connections, in as little Python as that takes.

aiohttp can do everything and costs more per request than the rest of the gateway together (see
docs/measurements.md). This can send one kind of request: a JSON body to a fixed `http://` address.
Everything else, and every other address, stays aiohttp's; errors are aiohttp's classes, so that
callers need not know which of the two answered.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import httptools

# Below the 5 seconds after which vLLM's server closes an idle connection, so that no request is
# sent on one that is being closed.
IDLE_SECONDS = 3.0

_HIGH_WATER = 1 << 20
"""Bytes of an answer that wait for their reader before the replica is asked to pause."""

_JOINED = 1 << 16
"""Up to here a body is copied behind its head: one system call instead of two."""


class CannotConnect(aiohttp.ClientConnectorError):
    """No connection could be made, so nothing was sent."""

    def __init__(self, address: str, reason: str):
        OSError.__init__(self, 111, reason)
        self._text = f"Cannot connect to {address}: {reason}"

    def __str__(self) -> str:
        return self._text


class Response:
    """The head of an answer, and its body as it comes."""

    __slots__ = ("_connection", "_pieces", "_size", "done", "error", "status")

    def __init__(self, connection: "_Connection"):
        self._connection = connection
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self.status = 0
        """HTTP status; 0 until the head is there."""
        self.done = False
        self.error: Exception | None = None

    @property
    def content(self) -> "Response":
        """Where the body is read from, as in aiohttp."""
        return self

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            aiohttp.ClientError, TimeoutError: it broke off, or nothing came for too long.
        """
        while not self.done:
            self._size = 0
            self._connection.resume()
            await self._connection.news()
        if self.error is not None:
            raise self.error
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def iter_any(self) -> AsyncIterator[bytes]:
        """The body in the pieces in which it arrives.

        Raises:
            aiohttp.ClientError, TimeoutError: as for `read`.
        """
        pieces, connection = self._pieces, self._connection
        while True:
            while pieces:
                piece = pieces.popleft()
                self._size -= len(piece)
                yield piece
            connection.resume()
            if self.done:
                break
            await connection.news()
        if self.error is not None:
            raise self.error

    def take(self, piece: bytes) -> None:
        """A further part of the body has come."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > _HIGH_WATER:
            self._connection.pause()


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, read_timeout: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_timeout = read_timeout
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._ends_with_connection = True
        self._keep = False
        self._response: Response | None = None
        self.transport: asyncio.Transport
        self.closed = False
        self.idle_since = 0.0
        self.last_heard = 0.0

    # -- from the transport ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.last_heard = self._loop.time()
        if self._response is None:
            # Nobody asked.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(aiohttp.ClientPayloadError(f"not HTTP: {error}"))
            self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        response = self._response
        if response is not None and not response.done:
            if response.status and self._ends_with_connection and error is None:
                response.done = True
            elif response.status:
                self._fail(aiohttp.ClientPayloadError("the answer is not complete"))
            else:
                self._fail(aiohttp.ServerDisconnectedError())
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    # -- from the parser -------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._response is not None and status >= 200:
            self._response.status = status

    def on_body(self, body: bytes) -> None:
        if self._response is not None:
            self._response.take(body)

    def on_message_complete(self) -> None:
        response = self._response
        # Not so for an interim answer (100 Continue): the real one follows.
        if response is not None and response.status:
            response.done = True
            self._keep = self._parser.should_keep_alive()

    # -- from the request ------------------------------------------------------------------

    def send(self, head: bytes, body: bytes) -> Response:
        """Begin a request."""
        response = self._response = Response(self)
        self._ends_with_connection, self._keep = True, False
        self.last_heard = self._loop.time()
        if self._read_timeout is not None and self._timer is None:
            self._timer = self._loop.call_later(self._read_timeout, self._look_at_the_clock)
        if len(body) < _JOINED:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        return response

    async def news(self) -> None:
        """Wait until something has come, or cannot come any more."""
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def pause(self) -> None:
        if not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self.closed:
                self.transport.resume_reading()

    def release(self) -> bool:
        """The answer has been read; whether the connection can take another request."""
        response, self._response = self._response, None
        usable = (
            response is not None
            and response.done
            and response.error is None
            and not self.closed
            and self._keep
        )
        if not usable:
            self.close()
        self.idle_since = self.last_heard
        return usable

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self.transport.close()

    def _fail(self, error: Exception) -> None:
        if self._response is not None and not self._response.done:
            self._response.error = error
            self._response.done = True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_at_the_clock(self) -> None:
        # One timer that looks now and then, instead of one that is set anew at every piece.
        self._timer = None
        if self._response is None or self._response.done or self._read_timeout is None:
            return
        left = self.last_heard + self._read_timeout - self._loop.time()
        if left > 0 or self._paused:
            later = max(left, 0.01) if not self._paused else self._read_timeout
            self._timer = self._loop.call_later(later, self._look_at_the_clock)
            return
        self._fail(aiohttp.SocketTimeoutError("no byte came for too long"))
        self.close()
        self._wake()


class Wire:
    """The kept connections to one replica."""

    def __init__(
        self, host: str, port: int, connect_timeout: float | None, read_timeout: float | None
    ):
        self._host = host
        self._port = port
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._idle: list[_Connection] = []
        self._heads: dict[str, bytes] = {}

    @classmethod
    def to(cls, url: str, timeout: aiohttp.ClientTimeout) -> "Wire | None":
        """The wire to a base URL; None where only aiohttp can go: TLS, user names, paths."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.username or parts.path.strip("/"):
            return None
        return cls(parts.hostname, parts.port or 80, timeout.sock_connect, timeout.sock_read)

    def post(self, path: str, body: bytes) -> "_Posting":
        """`async with wire.post(path, body) as response`; the body is JSON.

        Leaving the block before the answer has been read closes the connection.

        Raises:
            CannotConnect: nothing was sent.
            aiohttp.ClientError, TimeoutError: the connection broke, or was silent for too long.
        """
        return _Posting(self, path, body)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def connection(self) -> _Connection:
        """One that is free, else a new one."""
        if self._idle:
            oldest = asyncio.get_running_loop().time() - IDLE_SECONDS
            while self._idle:
                connection = self._idle.pop()
                if not connection.closed and connection.idle_since > oldest:
                    return connection
                connection.close()
        with _as_cannot_connect(f"{self._host}:{self._port}"):
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self._read_timeout), self._host, self._port
                )
        return connection

    def head(self, path: str, length: int) -> bytes:
        """The request's head."""
        start = self._heads.get(path)
        if start is None:
            host = f"[{self._host}]" if ":" in self._host else self._host
            start = self._heads[path] = (
                f"POST {path} HTTP/1.1\r\nhost: {host}:{self._port}\r\naccept: */*\r\n"
                "content-type: application/json\r\ncontent-length: "
            ).encode("ascii")
        return b"%b%d\r\n\r\n" % (start, length)

    def free(self, connection: _Connection) -> None:
        """Take a connection back, if it can be used again."""
        if connection.release():
            self._idle.append(connection)


class _Posting:
    __slots__ = ("_body", "_connection", "_path", "_wire")

    def __init__(self, wire: Wire, path: str, body: bytes):
        self._wire = wire
        self._path = path
        self._body = body

    async def __aenter__(self) -> Response:
        connection = self._connection = await self._wire.connection()
        response = connection.send(self._wire.head(self._path, len(self._body)), self._body)
        try:
            while not response.status and not response.done:
                await connection.news()
            if not response.status:
                raise response.error or aiohttp.ServerDisconnectedError()
        except BaseException:
            self._wire.free(connection)
            raise
        return response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wire.free(self._connection)


@contextmanager
def _as_cannot_connect(address: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise CannotConnect(address, "no connection in time") from None
    except OSError as error:
        raise CannotConnect(address, error.strerror or str(error)) from error
