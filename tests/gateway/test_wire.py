"""The lean client in front of servers that answer byte by byte, badly, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gateway.backends.wire import CannotConnect, Wire

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Reads requests, and answers each with the next of the given lists of pieces."""

    def __init__(self, *answers: list[bytes], then_close: bool = False):
        self.answers = list(answers)
        self.then_close = then_close
        self.requests: list[bytes] = []
        self.connections = 0
        self.hung_up = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
            if not self.then_close:
                await reader.read(1)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.hung_up.set()
            writer.close()


@asynccontextmanager
async def wire_to(handler: Handler, read: float | None = 5.0) -> AsyncIterator[Wire]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    wire = Wire.to(
        f"http://127.0.0.1:{port}", aiohttp.ClientTimeout(sock_connect=1, sock_read=read)
    )
    assert wire is not None
    try:
        yield wire
    finally:
        wire.close()
        server.close()


def whole(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (extra, len(body), body)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def ask(wire: Wire, body: bytes = b"{}") -> tuple[int, bytes]:
    async with wire.post("/v1/x", body) as response:
        return response.status, await response.read()


async def test_a_connection_is_used_again_and_again():
    server = Server([whole(b"one")], [whole(b"two")], [whole(b"")])
    async with wire_to(server) as wire:
        assert [await ask(wire, b'{"a":1}') for _ in range(3)] == [
            (200, b"one"),
            (200, b"two"),
            (200, b""),
        ]
    assert server.connections == 1
    assert all(r.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:") for r in server.requests)
    assert all(r.endswith(b'\r\n\r\n{"a":1}') for r in server.requests)


async def test_an_answer_may_come_byte_by_byte():
    text = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"
    server = Server([bytes([byte]) for byte in text], [whole(b"after")])
    async with wire_to(server) as wire:
        assert await ask(wire) == (404, b"none")
        assert await ask(wire) == (200, b"after")
    assert server.connections == 1


async def test_a_stream_is_given_piece_by_piece_as_it_comes():
    pieces = [b"5\r\nhello\r\n", b"6\r\n world\r\n", b"0\r\n\r\n"]
    server = Server([CHUNKED, *pieces], [whole(b"after")])
    async with wire_to(server) as wire:
        async with wire.post("/v1/x", b"{}") as response:
            assert [piece async for piece in response.content.iter_any()] == [b"hello", b" world"]
        assert await ask(wire) == (200, b"after")
    assert server.connections == 1


async def test_an_interim_answer_is_passed_over():
    server = Server([b"HTTP/1.1 100 Continue\r\n\r\n", whole(b"real")])
    async with wire_to(server) as wire:
        assert await ask(wire) == (200, b"real")


async def test_an_answer_without_a_length_ends_with_its_connection():
    server = Server([b"HTTP/1.1 200 OK\r\n\r\n", b"all of it"], then_close=True)
    async with wire_to(server) as wire:
        assert await ask(wire) == (200, b"all of it")


async def test_a_connection_that_is_to_be_closed_is_not_used_again():
    server = Server([whole(b"one", b"connection: close\r\n")], [whole(b"two")])
    async with wire_to(server) as wire:
        assert await ask(wire) == (200, b"one")
        assert await ask(wire) == (200, b"two")
    assert server.connections == 2


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], aiohttp.ServerDisconnectedError),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"], aiohttp.ClientPayloadError),
        ([CHUNKED, b"5\r\nhel"], aiohttp.ClientPayloadError),
        ([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"], aiohttp.ClientPayloadError),
    ],
)
async def test_an_answer_that_breaks_off_is_an_error(pieces, error):
    server = Server(pieces, then_close=True)
    async with wire_to(server) as wire:
        with pytest.raises(error):
            await ask(wire)


async def test_what_came_before_a_stream_broke_off_is_given_first():
    server = Server([CHUNKED, b"5\r\nhello\r\n"], then_close=True)
    got = []
    async with wire_to(server) as wire:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with wire.post("/v1/x", b"{}") as response:
                async for piece in response.content.iter_any():
                    got.append(piece)
    assert got == [b"hello"]


async def test_silence_is_a_timeout_and_a_slow_stream_is_not():
    server = Server([], [CHUNKED, *[b"1\r\na\r\n"] * 10, b"0\r\n\r\n"])
    async with wire_to(server, read=0.3) as wire:
        with pytest.raises(TimeoutError):
            await ask(wire)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for _ in range(12):
            await asyncio.sleep(0.1)
            writer.write(b"1\r\na\r\n")
        writer.write(b"0\r\n\r\n")

    async with wire_to(slow, read=1.0) as wire:
        assert await ask(wire) == (200, b"a" * 12)


async def test_leaving_early_hangs_up():
    server = Server([CHUNKED, b"5\r\nhello\r\n"])
    async with wire_to(server) as wire:
        async with wire.post("/v1/x", b"{}") as response:
            async for _ in response.content.iter_any():
                break
        await asyncio.wait_for(server.hung_up.wait(), 5)


async def test_a_request_that_is_cancelled_hangs_up():
    server = Server([])
    async with wire_to(server) as wire:
        task = asyncio.create_task(ask(wire))
        while not server.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.hung_up.wait(), 5)


async def test_a_reader_that_is_slow_makes_the_server_wait():
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for _ in range(256):
            writer.write(b"40000\r\n" + b"x" * 0x40000 + b"\r\n")
            await writer.drain()
            sent += 0x40000
        writer.write(b"0\r\n\r\n")

    async with wire_to(flood) as wire, wire.post("/v1/x", b"{}") as response:
        previous = -1
        while previous != sent:
            previous = sent
            await asyncio.sleep(0.2)
        assert sent < 32 * 2**20
        size = 0
        async for piece in response.content.iter_any():
            size += len(piece)
        assert size == 256 * 0x40000


async def test_a_large_body_arrives_whole():
    body = b'"' + b"x" * 3_000_000 + b'"'
    server = Server([whole(b"ok")])
    async with wire_to(server) as wire:
        assert await ask(wire, body) == (200, b"ok")
    assert server.requests[0].endswith(body)


async def test_nobody_there_is_an_error_that_names_the_place():
    async with wire_to(Server()) as wire:
        pass
    with pytest.raises(CannotConnect, match=r"127\.0\.0\.1:\d+"):
        await ask(wire)


@pytest.mark.parametrize("url", ["https://a:1", "http://u:p@a:1", "http://a:1/prefix"])
def test_what_it_cannot_do_is_left_to_aiohttp(url):
    assert Wire.to(url, aiohttp.ClientTimeout()) is None
