"""Who hangs up first on an idle connection: the client, or its next request may be lost."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.backends.launch import free_port

ASK = b"GET /healthz HTTP/1.1\r\nhost: strop\r\n\r\n"


@asynccontextmanager
async def served(folder: Path, base: Path, **settings: str) -> AsyncIterator[int]:
    """`strop serve`; its port."""
    port = free_port()
    env = {
        **os.environ,
        "STROP_DATA_DIR": str(folder),
        "STROP_REPLICAS": "[]",
        "STROP_BASE_MODEL": str(base),
        "STROP_PORT": str(port),
        **settings,
    }
    process = subprocess.Popen([sys.executable, "-m", "gateway.cli", "serve"], env=env)
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while True:
                try:
                    async with http.get(f"http://127.0.0.1:{port}/healthz"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    writer.write(ASK)
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"}")
    return head.startswith(b"HTTP/1.1 200 ")


async def closed(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Whether the other side hangs up within this time."""
    try:
        return await asyncio.wait_for(reader.read(1), seconds) == b""
    except TimeoutError:
        return False


@pytest.mark.parametrize("seconds", [None, 1])
async def test_an_idle_connection_outlives_those_of_clients(
    tmp_path: Path, toy_base: Path, seconds: int | None
):
    settings = {} if seconds is None else {"STROP_KEEP_ALIVE": str(seconds)}
    async with served(tmp_path / "strop", toy_base, **settings) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await answered(reader, writer)
        # OpenAI's clients in Python keep a connection for 5 s.
        assert await closed(reader, 6.0) == (seconds is not None)
        if seconds is None:
            assert await answered(reader, writer)
        writer.close()
