"""The closed loop on the real vLLM: capture, reward, train, publish, serve."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI
from sqlalchemy import select

from gateway.gateway import Gateway
from gateway.settings import PolicyConfig, Settings
from gateway.store import Database, queries
from gateway.store.models import CompletionUse, Step
from tests.conftest import RealVllm
from tests.gateway.conftest import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

POLICY = "e2e"
WORDS = ("red", "blue")


class Loop:
    """A gateway in front of the real vLLM, and a client of it."""

    def __init__(
        self, gateway: Gateway, client: AsyncOpenAI, http: aiohttp.ClientSession, url: str
    ):
        self.gateway, self.client, self.http, self.url = gateway, client, http, url

    async def rollout(self, question: str, group: str, **options):
        """Two turns; rewarded by what was said, so that rewards differ inside a group."""
        headers = {"X-Strop-Group": group}
        messages = [{"role": "user", "content": question}]
        first = await self.ask(messages, headers, **options)
        answer = first.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "Say it again, shorter."},
        ]
        second = await self.ask(messages, headers, **options)
        text = answer + (second.choices[0].message.content or "")
        return first, second, len(set(text)) / 40

    async def ask(self, messages, headers, **options):
        return await self.client.chat.completions.create(
            **{
                "model": POLICY,
                "messages": messages,
                "max_tokens": 6,
                "extra_headers": headers,
                **options,
            }
        )

    async def reward(self, **body) -> None:
        async with self.http.post(self.url + "/v1/rewards", json=body) as response:
            assert response.status == 201, await response.text()

    def trajectory(self, trajectory_id: str):
        with self.gateway.database.read() as connection:
            return queries.trajectory(connection, "default", trajectory_id)

    def completion(self, completion_id: str):
        with self.gateway.database.read() as connection:
            return queries.completion(connection, "default", completion_id)


@pytest.fixture
async def loop(real_vllm: RealVllm, tmp_path: Path) -> AsyncIterator[Loop]:
    settings = Settings(
        data_dir=tmp_path / "strop",
        replicas=[real_vllm.url],
        base_model=str(real_vllm.base_model),
        publish_poll=0.2,
        probe_tolerance=1e-4,
        policies={
            POLICY: PolicyConfig(
                group_size=3,
                groups_per_step=2,
                settle_seconds=0,
                training={"learning_rate": 3e-4},
            )
        },
    )
    async with (
        serving(settings) as (url, gateway),
        aiohttp.ClientSession() as http,
        AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=300) as client,
    ):
        await gateway.publisher.reconcile()
        yield Loop(gateway, client, http, url)


async def train_once(settings: Settings) -> str:
    """`python -m trainer --once`, as a process of its own; returns its log."""
    env = {**os.environ, "STROP_DATA_DIR": str(settings.data_dir), "OMP_NUM_THREADS": "2"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trainer",
        "--once",
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_the_loop_closes(loop: Loop):
    gateway = loop.gateway
    rollouts = await asyncio.gather(
        *(loop.rollout(f"Name a {word} thing.", f"g-{word}") for word in WORDS for _ in range(4))
    )
    # Tokens in the database, read back and joined over the turns, are what vLLM was given and gave.
    for first, second, _ in rollouts:
        one, two = loop.completion(first.id), loop.completion(second.id)
        assert one.trajectory_id == two.trajectory_id
        for row, reply in ((one, first), (two, second)):
            assert reply.model == f"{POLICY}@0"
            assert len(row.prompt_ids) == reply.usage.prompt_tokens
            assert len(row.choices[0].token_ids) == reply.usage.completion_tokens
            assert row.reason is None
            given = await tokenize(loop, gateway.pool.replicas[0].url, row.messages)
            assert row.prompt_ids == given
    # A completion without a reward, and one that cannot be trained on, beside the others.
    for index, (first, second, value) in enumerate(rollouts):
        if index == 0:
            continue
        await loop.reward(completion_id=second.id, reward=value)
    biased = await loop.ask([{"role": "user", "content": "Hi"}], {}, temperature=0)
    assert loop.completion(biased.id).reason == "biased_sampling"

    log = await train_once(gateway.settings)
    database: Database = gateway.database
    with database.read() as connection:
        policy = queries.policy(connection, "default", POLICY)
        step = connection.execute(select(Step.__table__)).mappings().one()
        uses = connection.execute(select(CompletionUse.__table__)).mappings().all()
    assert (policy["head"], step["state"]) == (1, "done"), log
    used = {use["completion_id"] for use in uses if use["reason"] is None}
    unrewarded = {rollouts[0][0].id, rollouts[0][1].id}
    assert not used & unrewarded
    assert used <= {c.id for first, second, _ in rollouts for c in (first, second)}
    assert step["metrics"]["tokens_trained"] == sum(use["tokens"] for use in uses)

    before = await gateway.pool.replicas[0].prompt_logprobs(f"{POLICY}@0", list(range(100, 140)))
    await gateway.publisher.reconcile()
    with database.read() as connection:
        version = queries.version(connection, "default", POLICY, 1)
    assert version["state"] == "serving", version["probe_result"]
    (numbers,) = version["probe_result"]["replicas"].values()
    # Served equals trained.
    assert numbers["mean_difference"] <= 1e-4
    assert numbers["mean_difference_to_previous"] > 10 * numbers["mean_difference"]
    # A retrained adapter really changes what is served, and the old one is what it was.
    replica = gateway.pool.replicas[0]
    after = await replica.prompt_logprobs(f"{POLICY}@1", list(range(100, 140)))
    again = await replica.prompt_logprobs(f"{POLICY}@0", list(range(100, 140)))
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3
    assert max(abs(a - b) for a, b in zip(before, again, strict=True)) < 1e-4
    reply = await loop.ask([{"role": "user", "content": "Hi"}], {})
    assert reply.model == f"{POLICY}@1"


async def test_a_group_with_equal_rewards_makes_no_step_and_says_why(loop: Loop):
    for word in WORDS:
        for _ in range(3):
            reply = await loop.ask([{"role": "user", "content": word}], {"X-Strop-Group": word})
            await loop.reward(completion_id=reply.id, reward=0.5)
    await train_once(loop.gateway.settings)
    with loop.gateway.database.read() as connection:
        assert queries.policy(connection, "default", POLICY)["head"] == 0
        assert connection.execute(select(Step.id)).first() is None
    trajectory = loop.trajectory(loop.completion(reply.id).trajectory_id)
    assert (trajectory.state, trajectory.reason) == ("skipped", "equal_rewards")


async def test_streams_and_several_choices_are_captured_exactly(loop: Loop):
    async for chunk in await loop.client.chat.completions.create(
        model=POLICY,
        messages=[{"role": "user", "content": "Count to ten."}],
        max_tokens=10,
        n=2,
        stream=True,
    ):
        completion_id = chunk.id
    row = loop.completion(completion_id)
    assert row.reason is None
    assert [len(c.token_ids) == len(c.logprobs) > 0 for c in row.choices] == [True, True]
    assert sum(len(c.token_ids) for c in row.choices) == row.completion_tokens


async def tokenize(loop: Loop, url: str, messages) -> list[int]:
    """What vLLM makes of messages, by its own route."""
    body = {"model": f"{POLICY}@0", "messages": messages, "add_generation_prompt": True}
    async with loop.http.post(url + "/tokenize", json=body) as response:
        return (await response.json())["tokens"]
