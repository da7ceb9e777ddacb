"""The process commits while requests come together, and the thread while they come one by one."""

import asyncio

import pytest
from sqlalchemy import func, select

from gateway.store import Database, outbox
from gateway.store.models import Completion, Reward
from gateway.store.rewards import NewReward
from gateway.writing import by_load
from gateway.writing.by_load import WriterByLoad
from tests.gateway.conftest import MakeStrop, make_strop, toy_base
from tests.store.conftest import Captured
from tests.store.test_journal import until
from tests.writing.conftest import Share
from tests.writing.test_kills import kill

__all__ = ["make_strop", "toy_base"]

on_sqlite = pytest.mark.parametrize("empty_url", ["sqlite"], indirect=True)


def by_thread(writer: WriterByLoad) -> int:
    return writer.committer.writes


async def there(writer: WriterByLoad) -> None:
    """Wait until the process takes what comes."""
    await until(lambda: writer._heard)


@on_sqlite
async def test_a_lone_request_needs_no_process(share: Share, captured: Captured):
    async with share(kind=WriterByLoad) as writer:
        writer.in_progress = lambda: 1
        item = captured()
        await writer.store(item)
        await writer.post_rewards("default", [NewReward(1.0, completion_id=item.id)])
        assert (by_thread(writer), writer.writes, writer.counts_all) == (2, 2, True)
        assert not writer.child.started


@on_sqlite
async def test_several_requests_start_it_and_a_lone_one_returns_to_the_thread(
    database: Database, share: Share, captured: Captured, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(by_load, "_BUSY_SECONDS", 0.0)
    async with share(kind=WriterByLoad) as writer:
        writer.in_progress = lambda: 8
        # Nobody waits for its start, even when its socket is there already.
        await writer.store(captured("a"))
        await until(lambda: writer._transport is not None)
        writer._heard, first = False, writer.answered
        writer.answered = lambda answers, status: None
        await asyncio.gather(*(writer.store(captured(f"a{i}")) for i in range(7)))
        assert by_thread(writer) == 8
        writer.answered = first
        first((), None)
        monkeypatch.setattr(by_load, "_BUSY_SECONDS", 3600.0)
        await asyncio.gather(*(writer.store(captured(f"b{i}")) for i in range(8)))
        assert by_thread(writer) == 8
        await until(lambda: writer.writes == 16)
        assert writer.commits > writer.committer.commits > 0
        writer.in_progress = lambda: 1
        await writer.store(captured("still-busy"))
        assert by_thread(writer) == 8
        writer._busy_until = 0.0
        await writer.store(captured("alone"))
        assert by_thread(writer) == 9
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(Completion)).scalar_one() == 18


@on_sqlite
async def test_what_is_traced_is_noted_whoever_commits_it(
    database: Database, share: Share, captured: Captured
):
    async with share(kind=WriterByLoad, traced=("default",)) as writer:
        items = [captured(str(n)) for n in range(4)]

        async def commit(number: int) -> None:
            item = items[number]
            await writer.store(item)
            await writer.post_rewards("default", [NewReward(1.0, completion_id=item.id)])

        writer.in_progress = lambda: 1
        await commit(0)
        await writer.store(captured("elsewhere", project="elsewhere"))
        assert not writer.child.started
        writer.in_progress = lambda: 8
        # Of these the first starts the process, and the last is committed by it.
        await commit(1)
        await commit(2)
        await there(writer)
        before = by_thread(writer)
        await commit(3)
        assert by_thread(writer) == before
    with database.read() as connection:
        pending = outbox.pending(connection, "default", 100)
        assert sorted(entry.kind for entry in pending) == ["completion"] * 4 + ["reward"] * 4
        assert {item.id for item in items} <= {entry.ref for entry in pending}
        assert outbox.pending(connection, "elsewhere", 100) == []


@on_sqlite
async def test_the_thread_goes_on_while_the_process_is_dead(
    database: Database, share: Share, captured: Captured
):
    async with share(kind=WriterByLoad) as writer:
        writer.in_progress = lambda: 8
        await writer.store(captured("first"))
        await there(writer)
        stored: list[str] = []
        ended = False

        async def load(number: int) -> None:
            while not ended:
                item = captured(f"t{number}-{len(stored)}")
                await writer.store(item)
                stored.append(item.id)
                new = NewReward(1.0, completion_id=item.id)
                (found,), fresh = await writer.post_rewards("default", [new])
                assert (found.id, fresh) == (new.id, True)

        tasks = [asyncio.create_task(load(i)) for i in range(8)]
        for _ in range(4):
            before = len(stored)
            await until(lambda before=before: len(stored) > before + 20)
            await kill(writer)
            # In between the load also goes down, so that both commit within moments.
            writer.in_progress = lambda: 1
            writer._busy_until = 0.0
            await until(lambda before=before: len(stored) > before + 40)
            writer.in_progress = lambda: 8
        ended = True
        await asyncio.gather(*tasks)
    with database.read() as connection:
        for table, rows in ((Completion, len(stored) + 1), (Reward, len(stored))):
            assert connection.execute(select(func.count()).select_from(table)).scalar_one() == rows


async def test_a_gateway_on_sqlite_chooses_by_load(make_strop: MakeStrop):
    async with make_strop(writer="auto") as strop:
        ask = {"model": "agent", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
        assert (await strop.post("/v1/chat/completions", ask))[0] == 200
        writer = strop.gateway.writer
        assert isinstance(writer, WriterByLoad)
        assert not writer.child.started
        answers = await asyncio.gather(
            *(strop.post("/v1/chat/completions", ask) for _ in range(16))
        )
        assert {status for status, _ in answers} == {200}
        await there(writer)
        before = by_thread(writer)
        answers = await asyncio.gather(
            *(strop.post("/v1/chat/completions", ask) for _ in range(16))
        )
        assert {status for status, _ in answers} == {200}
        assert by_thread(writer) < before + 16
        with strop.gateway.database.read() as connection:
            rows = connection.execute(select(func.count()).select_from(Completion)).scalar_one()
        assert rows == 33
