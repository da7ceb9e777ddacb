"""kill -9 of the gateway in the middle of a load loses nothing that a client was told is there."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
from openai import AsyncOpenAI, OpenAIError
from sqlalchemy import select

from gateway.backends.launch import free_port
from gateway.store import Database, queries
from gateway.store.models import Choice, Completion, Reward
from tests.fake_vllm import FakeVllm

ASK = [{"role": "user", "content": "Do not forget this."}]


async def test_every_acknowledged_completion_and_reward_survives_a_kill(
    tmp_path: Path, toy_base: Path
):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    completions: dict[str, str] = {}
    rewards: set[str] = set()
    async with FakeVllm() as vllm:
        env = {
            **os.environ,
            "STROP_DATA_DIR": str(tmp_path / "strop"),
            "STROP_REPLICAS": f'["{vllm.url}"]',
            "STROP_BASE_MODEL": str(toy_base),
            "STROP_PUBLISH_POLL": "0.05",
        }
        command = [sys.executable, "-m", "uvicorn", "--factory", "gateway.app:serve"]
        process = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "warning"], env=env
        )
        try:
            async with (
                aiohttp.ClientSession() as http,
                AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client,
            ):
                await ready(http, url)

                async def load(stream: bool) -> None:
                    while True:
                        completion_id, text = await ask(client, stream)
                        completions[completion_id] = text
                        body = {"completion_id": completion_id, "reward": 1.0}
                        async with http.post(url + "/v1/rewards", json=body) as response:
                            if response.status == 201:
                                rewards.add((await response.json())["id"])

                tasks = [asyncio.create_task(load(i % 2 == 0)) for i in range(16)]
                while len(completions) < 150:
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            process.kill()
            process.wait()
    assert all(isinstance(r, OpenAIError | aiohttp.ClientError) for r in results)
    database = Database(f"sqlite:///{tmp_path / 'strop' / 'strop.db'}")
    with database.read() as connection:
        stored = set(connection.execute(select(Completion.id)).scalars())
        assert set(completions) <= stored
        assert rewards <= set(connection.execute(select(Reward.id)).scalars())
        with_choices = set(connection.execute(select(Choice.completion_id)).scalars())
        assert set(completions) <= with_choices
        for completion_id, text in list(completions.items())[:20]:
            row = queries.completion(connection, "default", completion_id)
            assert (row.response["choices"][0]["message"]["content"] or "") == text
    database.dispose()


async def ready(http: aiohttp.ClientSession, url: str) -> None:
    for _ in range(600):
        try:
            async with http.get(url + "/readyz") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.05)
    raise AssertionError("the gateway did not become ready")


async def ask(client: AsyncOpenAI, stream: bool) -> tuple[str, str]:
    """One answer, taken in to its very end."""
    options = {"model": "agent", "messages": ASK, "max_tokens": 6}
    if not stream:
        reply = await client.chat.completions.create(**options)
        return reply.id, reply.choices[0].message.content or ""
    text, finished = "", False
    async for chunk in await client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finished |= choice.finish_reason is not None
    if not finished:
        raise aiohttp.ClientPayloadError("the stream was cut")
    return chunk.id, text
