"""Publishing under load: no request fails, no answer is mixed, none is of a wrong version."""

import asyncio
import os
import time

import orjson
from sqlalchemy import select

from gateway.store import queries
from gateway.store.models import Completion
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.test_publisher import write_version
from tests.toy_vllm.model import toy_logprobs

STREAMS = 16
PUBLISHES = int(os.environ.get("STROP_TEST_PUBLISHES", "20"))
"""100 for the figure in docs/measurements.md."""
PATIENCE = 250.0


def alias(strop: Running) -> int:
    """The version that new trajectories begin with at this moment."""
    (found,) = strop.gateway.publisher.catalog.of("default")
    return found.alias


async def one(strop: Running, number: int) -> tuple[int, int, set[str], str]:
    """One streamed answer: the alias when it began and when it ended, its models, its id."""
    began = alias(strop)
    models: set[str] = set()
    stream = await strop.client.chat.completions.create(
        model="agent",
        messages=[{"role": "user", "content": f"Say something, {number}."}],
        max_tokens=8,
        stream=True,
        # A trajectory keeps the version it began with: each of these is one.
        extra_headers={"X-Strop-Trajectory": f"t-{number}"},
    )
    async for chunk in stream:
        models.add(chunk.model)
        answer = chunk.id
    return began, alias(strop), models, answer


async def test_many_publishes_under_sixteen_streams(make_strop: MakeStrop):
    async with make_strop() as strop:
        await publish_under_load(strop)


async def publish_under_load(strop: Running) -> None:
    done = asyncio.Event()
    found: list[tuple[int, int, set[str], str]] = []
    failed: list[BaseException] = []
    numbers = iter(range(10**9))

    async def keep_asking() -> None:
        while not done.is_set():
            try:
                found.append(await one(strop, next(numbers)))
            except Exception as error:
                failed.append(error)

    async with asyncio.TaskGroup() as streams:
        for _ in range(STREAMS):
            streams.create_task(keep_asking())
        until = time.monotonic() + PATIENCE
        folders = {0: strop.gateway.settings.artifacts() / "default" / "agent" / "000000"}
        for number in range(1, PUBLISHES + 1):
            folders[number] = await asyncio.to_thread(write_version, strop, number)
            while alias(strop) < number:
                assert not strop.gateway.publisher.failures, strop.gateway.publisher.failures
                assert time.monotonic() < until, f"{number} was not published in time"
                await asyncio.sleep(0.01)
        done.set()
    assert failed == []
    assert len(found) > STREAMS
    seen = set()
    for began, ended, models, _ in found:
        # One version from the first chunk to the last, and one that was served meanwhile.
        (model,) = models
        number = int(model.removeprefix("agent@"))
        assert began <= number <= ended
        seen.add(number)
    assert len(seen) > 2
    check_what_was_sampled(strop, folders, {answer for *_, answer in found})


def check_what_was_sampled(strop: Running, folders: dict, answers: set[str]) -> None:
    """The logged logprobs of every token are those of the version that the row names."""
    with strop.gateway.database.read() as connection:
        rows = connection.execute(
            select(Completion.id, Completion.version).where(Completion.id.in_(answers))
        ).all()
    assert {row.id for row in rows} == answers
    with strop.gateway.database.read() as connection:
        for row in rows:
            stored = queries.completion(connection, "default", row.id)
            (choice,) = stored.choices
            whole = [*stored.prompt_ids, *choice.token_ids]
            expected = toy_logprobs(folders[row.version], whole)[-len(choice.token_ids) :]
            difference = max(abs(a - b) for a, b in zip(choice.logprobs, expected, strict=True))
            assert difference < 1e-4, orjson.dumps([row.id, row.version])
