"""Versions published one after the other under streams that never pause; and what came of them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from openai import AsyncOpenAI
from sqlalchemy import insert, update

from gateway.gateway import Gateway
from gateway.store.models import Policy, Version

STREAMS = 16


@dataclass
class Answer:
    """One streamed answer."""

    began: int
    """The alias when it was asked for, and when it ended."""
    ended: int
    models: set[str]
    """What its chunks said that they come from."""
    id: str


@dataclass
class Load:
    """What the streams got."""

    answers: list[Answer] = field(default_factory=list)
    failed: list[BaseException] = field(default_factory=list)

    def check(self, policy: str) -> None:
        """No request failed, no answer is mixed, none is of a version that was not served."""
        assert self.failed == []
        assert len(self.answers) > STREAMS
        seen = set()
        for answer in self.answers:
            # One version from the first chunk to the last, and one that was served meanwhile.
            (model,) = answer.models
            number = int(model.removeprefix(f"{policy}@"))
            assert answer.began <= number <= answer.ended
            seen.add(number)
        assert len(seen) > 2


def alias(gateway: Gateway) -> int:
    """The version that new trajectories begin with at this moment."""
    (found,) = gateway.publisher.catalog.of("default")
    return found.alias


def add_version(
    gateway: Gateway, policy: str, number: int, folder: Path, probe: dict | None, parent: int = 0
) -> None:
    """The row that the trainer leaves when it has written a version."""
    with gateway.database.write() as connection:
        connection.execute(
            insert(Version).values(
                project="default",
                policy=policy,
                number=number,
                parent=parent,
                state="ready",
                adapter_path=str(folder),
                probe=probe,
                created_at=time.time(),
            )
        )
        connection.execute(update(Policy).values(head=number))


async def ask(gateway: Gateway, client: AsyncOpenAI, policy: str, number: int) -> Answer:
    """One streamed answer, of a trajectory of its own: those keep the version they began with."""
    began = alias(gateway)
    models: set[str] = set()
    stream = await client.chat.completions.create(
        model=policy,
        messages=[{"role": "user", "content": f"Say something, {number}."}],
        max_tokens=8,
        stream=True,
        extra_headers={"X-Strop-Trajectory": f"t-{number}"},
    )
    async for chunk in stream:
        models.add(chunk.model)
        answer = chunk.id
    return Answer(began, alias(gateway), models, answer)


async def publish_under_load(
    gateway: Gateway,
    client: AsyncOpenAI,
    policy: str,
    write: Callable[[int], Awaitable[None]],
    publishes: int,
    patience: float,
) -> Load:
    """Publish versions 1, 2, … while sixteen streams ask; each waits for the one before.

    Args:
        write: leaves a version as the trainer does.
        patience: seconds for all of them.
    """
    done = asyncio.Event()
    load = Load()
    numbers = iter(range(10**9))

    async def keep_asking() -> None:
        while not done.is_set():
            try:
                load.answers.append(await ask(gateway, client, policy, next(numbers)))
            except Exception as error:
                load.failed.append(error)

    async with asyncio.TaskGroup() as streams:
        for _ in range(STREAMS):
            streams.create_task(keep_asking())
        until = time.monotonic() + patience
        for number in range(1, publishes + 1):
            await write(number)
            while alias(gateway) < number:
                assert not gateway.publisher.failures, gateway.publisher.failures
                assert time.monotonic() < until, f"{number} was not published in time"
                await asyncio.sleep(0.01)
        done.set()
    return load
