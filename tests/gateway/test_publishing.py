"""Publishing under load: no request fails, no answer is mixed, none is of a wrong version.

tests/e2e/test_publishing.py does the same on the real vLLM.
"""

import asyncio
import os
from pathlib import Path

import orjson
from sqlalchemy import select

from gateway.store import queries
from gateway.store.models import Completion
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.publishing import publish_under_load
from tests.gateway.test_publisher import write_version
from tests.toy_vllm.model import toy_logprobs

PUBLISHES = int(os.environ.get("STROP_TEST_PUBLISHES", "20"))
"""100 for the figure in docs/measurements.md."""
PATIENCE = 250.0


async def test_many_publishes_under_sixteen_streams(make_strop: MakeStrop):
    async with make_strop() as strop:
        folders = {0: strop.gateway.settings.artifacts() / "default" / "agent" / "000000"}

        async def write(number: int) -> None:
            folders[number] = await asyncio.to_thread(write_version, strop, number)

        load = await publish_under_load(
            strop.gateway, strop.client, "agent", write, PUBLISHES, PATIENCE
        )
        load.check("agent")
        check_what_was_sampled(strop, folders, {answer.id for answer in load.answers})


def check_what_was_sampled(strop: Running, folders: dict[int, Path], answers: set[str]) -> None:
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
