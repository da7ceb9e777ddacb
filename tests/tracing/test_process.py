"""The whole gateway with Langfuse: away for a third of the time, killed, stopped, and started."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI, OpenAIError

from gateway.backends.launch import free_port
from gateway.store import Database, leases, outbox
from gateway.store.writer import Writer
from gateway.tracing import ids
from gateway.tracing.channel import Channel
from gateway.tracing.pace import Pace
from gateway.tracing.process import Job, run
from gateway.tracing.settings import LangfuseSettings
from gateway.tracing.writes import Writes
from tests.fake_langfuse import FakeLangfuse
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import toy_base as toy_base
from tests.gateway.test_crash import ready
from tests.store.conftest import Captured
from tests.tracing.conftest import PAGE, environment, keys

ASK: list[Any] = [{"role": "user", "content": "Trace me."}]


@asynccontextmanager
async def started(env: dict[str, str]) -> AsyncIterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "uvicorn", "--factory", "gateway.app:serve"]
    command += ["--port", env["STROP_PORT"], "--log-level", "warning"]
    process = subprocess.Popen(command, env=env)
    try:
        async with aiohttp.ClientSession() as http:
            await ready(http, f"http://127.0.0.1:{env['STROP_PORT']}")
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def entries(database: Database) -> int:
    with database.read() as connection:
        return sum(lag.waiting + lag.refused for lag in outbox.lag(connection, time.time()))


async def test_nothing_is_lost_while_langfuse_is_away_and_the_gateway_is_killed(
    tmp_path: Path, toy_base: Path, langfuse: FakeLangfuse
):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    completions: set[str] = set()
    rewarded: set[str] = set()
    async with FakeVllm() as vllm:
        env = {
            **environment(tmp_path, toy_base, vllm, port, langfuse),
            "STROP_LANGFUSE__DRAIN_SECONDS": "100",
        }

        async def load(until: int) -> None:
            async with (
                aiohttp.ClientSession() as http,
                AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
            ):

                async def one() -> None:
                    while len(rewarded) < until:
                        reply = await client.chat.completions.create(
                            model="agent", messages=ASK, max_tokens=3
                        )
                        completions.add(reply.id)
                        body = {"completion_id": reply.id, "reward": 1.0}
                        async with http.post(url + "/v1/rewards", json=body) as response:
                            if response.status == 201:
                                rewarded.add(reply.id)

                results = await asyncio.gather(*(one() for _ in range(8)), return_exceptions=True)
            for result in results:
                assert result is None or isinstance(result, OpenAIError | aiohttp.ClientError)

        database = Database(f"sqlite:///{tmp_path / 'strop' / 'strop.db'}")
        async with started(env) as process:
            await load(60)
            await langfuse.until(lambda: len(langfuse.scores) > 20)
            langfuse.down = True
            await load(110)
            killed = asyncio.create_task(load(100_000))
            while len(rewarded) < 130:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            await killed
        assert entries(database) > 0
        async with started(env) as process:
            await load(len(rewarded) + 20)
            assert len(langfuse.spans) < 2 * len(completions)
            langfuse.down = False
            await load(len(rewarded) + 20)
            # An orderly end leaves nothing behind.
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 120) in (0, -signal.SIGTERM)
        assert entries(database) == 0
    generations = {
        span.metadata["completion_id"]
        for span in langfuse.spans.values()
        if span.get("type") == "generation"
    }
    with database.read() as connection:
        from sqlalchemy import select

        from gateway.store.models import Completion, Reward

        stored = set(connection.execute(select(Completion.id)).scalars())
        stored_rewards = set(connection.execute(select(Reward.completion_id)).scalars())
    database.dispose()
    assert completions <= stored
    assert rewarded <= stored_rewards
    assert generations == stored
    assert len(langfuse.scores) == len(stored_rewards)
    assert {score["observationId"] for score in langfuse.scores.values()} == {
        ids.generation_id(each) for each in stored_rewards
    }
    assert {span.parent_id for span in langfuse.spans.values()} - {""} <= {
        span.id for span in langfuse.spans.values() if span.get("type") == "agent"
    }


async def test_of_several_processes_one_sends_and_another_takes_over(
    database: Database, writer: Writer, langfuse: FakeLangfuse, captured: Captured
):
    settings = LangfuseSettings(projects={"default": keys(langfuse)}, send_seconds=0.01)
    stops = [threading.Event(), threading.Event()]
    channels = [Channel(Writes(database), "default", settings, PAGE, stop) for stop in stops]
    threads = [threading.Thread(target=channel.run) for channel in channels]
    try:
        threads[0].start()
        await writer.store(captured("a"))
        await langfuse.until(lambda: len(langfuse.spans) == 2)
        threads[1].start()
        for n in range(20):
            await writer.store(captured(f"t{n}"))
        await langfuse.until(lambda: len(langfuse.spans) == 42)
        assert channels[1].sender.sent == 0
        stops[0].set()
        await asyncio.to_thread(threads[0].join)
        await writer.store(captured("b"))
        await langfuse.until(lambda: len(langfuse.spans) == 44)
        assert channels[1].sender.sent == 2
    finally:
        for stop in stops:
            stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)


async def test_each_project_goes_to_the_langfuse_of_its_keys(
    tmp_path: Path, database: Database, langfuse: FakeLangfuse, captured: Captured
):
    async with FakeLangfuse("pk-lf-shop", "sk-lf-shop") as shop:
        projects = {"default": keys(langfuse), "shop": keys(shop)}
        settings = LangfuseSettings(projects=projects, send_seconds=0.01)
        writer = Writer(database, traced=settings.projects)
        writer.start()
        items = [captured(name, project=name) for name in ("default", "shop", "elsewhere")]
        for item in items:
            await writer.store(item)
        url = f"sqlite:///{tmp_path / 'strop.db'}"
        job = Job(database_url=url, public_url=PAGE, langfuse=settings)
        stop = threading.Event()
        thread = threading.Thread(target=run, args=(job, stop, Pace(0.0)))
        thread.start()
        try:
            await langfuse.until(lambda: len(langfuse.spans) == len(shop.spans) == 2)
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
        assert langfuse.generation(items[0].id).trace_id == ids.trace_id("default", "default")
        assert shop.generation(items[1].id).trace_id == ids.trace_id("shop", "shop")
        assert shop.problems == []
        await writer.close()
    assert entries(database) == 0


def test_the_lease_of_a_dead_process_is_free_and_that_of_a_living_one_is_not(database: Database):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = leases.new_owner().partition("/")[0]
    own, other = leases.new_owner(), f"{host}/{os.getpid()}/other"

    def take(owner: str, now: float) -> bool:
        with database.write() as connection:
            return leases.take(connection, "x", owner, 10.0, now)

    assert take(f"{host}/{dead.pid}/1", 0.0)
    assert take(own, 1.0)
    assert not take(other, 2.0)
    assert take(own, 9.0)
    assert not take(other, 18.0)
    assert take(other, 19.5)
    with database.write() as connection:
        leases.give_back(connection, "x", own)
        leases.give_back(connection, "x", other)
    assert take("elsewhere/1/1", 20.0)
    assert not take(own, 21.0)
    assert take(own, 31.0)


def test_langfuse_is_imported_only_where_it_is_configured():
    code = (
        "import sys, gateway.app, gateway.cli; gateway.app.build();"
        "assert not {'langfuse', 'opentelemetry', 'litellm'} & set(sys.modules)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("LANGFUSE_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
