"""Of several processes of one gateway one has a sender, and another when that one is gone."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.backends.launch import free_port
from gateway.workers import Worker
from tests.fake_langfuse import FakeLangfuse
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import toy_base as toy_base
from tests.gateway.test_crash import ready
from tests.tracing.conftest import environment

BODY: dict[str, Any] = {
    "model": "agent",
    "messages": [{"role": "user", "content": "Trace me."}],
    "max_tokens": 3,
}


def senders(gateway: int) -> list[psutil.Process]:
    """The processes below a gateway that send to Langfuse."""
    found = []
    for process in psutil.Process(gateway).children(recursive=True):
        try:
            if process.cmdline()[1:] == ["-m", "gateway.tracing"]:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


async def answering(http: aiohttp.ClientSession, url: str) -> None:
    """Several processes take longer to start than one."""
    for attempt in range(5):
        try:
            return await ready(http, url)
        except AssertionError:
            if attempt == 4:
                raise


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.1)


def test_one_process_sends_whoever_publishes(tmp_path: Path):
    first, second = Worker(tmp_path, 2), Worker(tmp_path, 2)
    assert second.publishes()
    assert first.sends()
    assert not second.sends()
    assert first.sends()
    first.close()
    assert second.sends()
    assert Worker(tmp_path / "other", 1).sends()


async def test_of_several_processes_one_starts_a_sender(
    tmp_path: Path, toy_base: Path, langfuse: FakeLangfuse
):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with FakeVllm() as vllm, aiohttp.ClientSession() as http:
        env = environment(tmp_path, toy_base, vllm, port, langfuse)
        command = [sys.executable, "-m", "gateway.cli", "serve", "--workers", "2"]
        process = subprocess.Popen(command, env=env)

        async def ask() -> None:
            async with http.post(url + "/v1/chat/completions", json=BODY) as response:
                assert response.status == 200

        try:
            await answering(http, url)
            await asyncio.gather(*(ask() for _ in range(12)))
            await langfuse.until(lambda: len(langfuse.spans) == 24)
            (sender,) = senders(process.pid)
            worker = sender.parent()
            assert worker is not None
            worker.send_signal(signal.SIGKILL)
            # Its sender is told by that, and ends; that of another worker goes on.
            await until(lambda: sender not in senders(process.pid))
            await until(lambda: len(senders(process.pid)) == 1)
            await answering(http, url)
            await ask()
            await langfuse.until(lambda: len(langfuse.spans) == 26)
            assert len(senders(process.pid)) == 1
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)
