"""The whole gateway while PostgreSQL is away, is slow, and is back."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI
from sqlalchemy import select, text

from gateway.backends.launch import free_port
from gateway.store import Database, queries
from gateway.store.models import Completion, Reward
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.test_crash import ask, ready
from tests.store import conftest as store
from tests.store import test_journal

postgres, postgres_url, away = store.postgres, test_journal.postgres_url, test_journal.away

# Without a key the gateway asks the database every few seconds whether there are any.
KEY = "sk-strop-test"
AUTH = {"authorization": f"Bearer {KEY}"}
ASK: list[Any] = [{"role": "user", "content": "Go on without it."}]


async def get(strop: Running, path: str) -> tuple[int, Any, Any]:
    async with strop.http.get(strop.url + path, headers=AUTH) as response:
        return response.status, await response.json(), response.headers


async def drained(http: aiohttp.ClientSession, url: str) -> None:
    async def entries() -> int:
        async with http.get(url + "/readyz") as response:
            return (await response.json())["journal"]["entries"]

    for _ in range(1000):
        if await entries() == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the journal did not get empty")


async def test_a_gateway_goes_on_without_its_database(
    make_strop: MakeStrop, postgres: Any, postgres_url: str
):
    async with make_strop(database_url=postgres_url, admin_key=KEY) as strop:
        client = strop.client.with_options(api_key=KEY)
        messages = [*ASK]
        ids = []

        async def turn(**options: Any) -> None:
            reply = await client.chat.completions.create(
                model="agent", messages=messages, max_tokens=4, **options
            )
            ids.append(reply.id)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "And then?"})

        await turn()
        with away(postgres):
            await turn()
            await turn()
            streamed, _ = await ask(client, stream=True)
            named = {"x-strop-trajectory": "named", "x-strop-group": "g", "x-strop-split": "eval"}
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model="agent", messages=ASK, max_tokens=4, extra_headers=named
                )
            # A conversation that only the database knows is taken for a new one.
            strop.gateway.placements.__init__(strop.gateway.database)
            unknown = [*ASK, {"role": "assistant", "content": "?"}, *ASK]
            await client.chat.completions.create(model="agent", messages=unknown, max_tokens=4)
            status, body = await strop.post(
                "/v1/rewards",
                [{"completion_id": ids[0], "reward": 0.0}, {"trajectory_id": "named", "reward": 1}],
                **AUTH,
            )
            assert status == 202
            assert [each["verified"] for each in body["data"]] == [False, False]
            status, late = await strop.post(
                "/v1/rewards", {"completion_id": ids[0], "reward": 0.5}, **AUTH
            )
            assert (status, late["reward"], late["completion_id"]) == (202, 0.5, ids[0])
            status, shown, headers = await get(strop, f"/v1/chat/completions/{ids[0]}")
            assert (status, shown["error"]["code"]) == (503, "database_unavailable")
            assert int(headers["retry-after"]) > 0
            status, _ = await strop.post("/v1/policies", {"name": "new"}, **AUTH)
            assert status == 503
            _, shown, _ = await get(strop, "/readyz")
            assert shown["journal"]["entries"] == 8
            assert shown["journal"]["oldest_seconds"] < 30
        await drained(strop.http, strop.url)
        # The second is over for which nobody asks a database that did not answer.
        strop.gateway.placements._away_until = 0.0
        await turn()
        status, body = await strop.post("/v1/rewards", {"completion_id": "?", "reward": 1}, **AUTH)
        assert status == 404
        status, shown, _ = await get(strop, f"/v1/chat/completions/{ids[0]}")
        assert [reward["reward"] for reward in shown["strop"]["rewards"]] == [0.0, 0.5]
        assert shown["strop"]["rewards"][1]["id"] == late["id"]
        with strop.gateway.database.read() as connection:
            place = queries.trajectory_place(connection, "default", "named", "agent")
            assert place == ("g", "eval", None, 0)
            found = queries.completion(connection, "default", ids[2])
            whole = queries.trajectory(connection, "default", found.trajectory_id)
            assert queries.completion(connection, "default", streamed) is not None
            assert queries.completion(connection, "default", reply.id) is not None
        assert [completion.id for completion in whole.completions] == ids
        assert found.messages == messages[:5]
        status, shown, _ = await get(strop, "/readyz")
        assert (status, shown["journal"]["rejected"]) == (200, 0)


async def test_a_gateway_killed_with_a_full_journal_moves_it_at_its_next_start(
    tmp_path: Path, toy_base: Path, postgres: Any, postgres_url: str
):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    rewards: list[str] = []
    completions: list[str] = []
    async with (
        FakeVllm() as vllm,
        aiohttp.ClientSession(headers=AUTH) as http,
        AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client,
    ):
        env = {
            **os.environ,
            "STROP_DATA_DIR": str(tmp_path / "strop"),
            "STROP_DATABASE_URL": postgres_url,
            "STROP_ADMIN_KEY": KEY,
            "STROP_REPLICAS": f'["{vllm.url}"]',
            "STROP_BASE_MODEL": str(toy_base),
            "STROP_PUBLISH_POLL": "0.05",
        }
        command = [sys.executable, "-m", "uvicorn", "--factory", "gateway.app:serve"]
        command += ["--port", str(port), "--log-level", "error"]

        async def rated(stream: bool) -> None:
            completion_id, _ = await ask(client, stream)
            completions.append(completion_id)
            body = {"completion_id": completion_id, "reward": 1.0}
            async with http.post(url + "/v1/rewards", json=body) as response:
                assert response.status in (201, 202)
                rewards.append((await response.json())["id"])

        process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        try:
            await ready(http, url)
            await rated(False)
            with away(postgres):
                await asyncio.gather(*(rated(i % 2 == 0) for i in range(20)))
                process.send_signal(signal.SIGKILL)
                process.wait()
            process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
            await ready(http, url)
            await drained(http, url)
            await rated(True)
        finally:
            process.kill()
            process.wait()
    database = Database(postgres_url)
    with database.read() as connection:
        assert Counter(connection.execute(select(Completion.id)).scalars()) == Counter(completions)
        assert Counter(connection.execute(select(Reward.id)).scalars()) == Counter(rewards)
    database.dispose()


async def test_a_slow_database_is_a_429_and_no_growing_queue(
    make_strop: MakeStrop, postgres_url: str
):
    options = {"database_url": postgres_url, "admin_key": KEY, "commit_queue": 3}
    async with make_strop(**options) as strop:
        body = {"model": "agent", "messages": ASK, "max_tokens": 2}

        async def post() -> tuple[int, Any, Any]:
            request = strop.http.post(strop.url + "/v1/chat/completions", json=body, headers=AUTH)
            async with request as response:
                return response.status, await response.json(), response.headers

        with strop.gateway.database.write() as connection:
            connection.execute(text("LOCK TABLE completions IN ACCESS EXCLUSIVE MODE"))
            waiting = [asyncio.create_task(post()) for _ in range(3)]
            while not strop.gateway.writer.full:
                await asyncio.sleep(0.01)
            for _ in range(5):
                status, shown, headers = await post()
                assert (status, shown["error"]["code"]) == (429, "log_queue_full")
                assert headers["retry-after"] == "1"
            rating = {"trajectory_id": "t", "reward": 1}
            status, _ = await strop.post("/v1/rewards", rating, **AUTH)
            assert status == 429
            assert not any(task.done() for task in waiting)
        answers = await asyncio.gather(*waiting)
        assert [status for status, *_ in answers] == [200] * 3
        for _, reply, _ in answers:
            status, _, _ = await get(strop, f"/v1/chat/completions/{reply['id']}")
            assert status == 200
        assert strop.gateway.writer.journal.state()["entries"] == 0
