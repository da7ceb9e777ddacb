"""What a gateway sees of the process that commits: the same as of a thread."""

import asyncio
import pickle
import sqlite3
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from gateway.store import Database, queries
from gateway.store.deletion import delete_trajectories
from gateway.store.journal import Journal
from gateway.store.models import Completion, Reward
from gateway.store.rewards import IdempotencyConflict, NewReward, UnknownTarget
from gateway.store.writer import QueueFull
from gateway.workers import Worker
from gateway.writing.frames import Frames, framed
from gateway.writing.shared import socket_path
from tests.store.conftest import Captured
from tests.store.test_journal import away, until
from tests.writing.conftest import Share


def count(database: Database, table: Any) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


async def test_completions_rewards_and_operations_are_durable_when_they_return(
    database: Database, share: Share, captured: Captured
):
    async with share() as writer:
        items = [captured(f"t{i}") for i in range(100)]
        await asyncio.gather(*(writer.store(item) for item in items))
        assert count(database, Completion) == 100
        posted = [NewReward(0.5, completion_id=items[0].id, metadata={"a": [1]})]
        (stored,), fresh = await writer.post_rewards("default", posted)
        assert (stored.id, stored.reward, fresh) == (posted[0].id, 0.5, True)
        assert count(database, Reward) == 1
        assert await writer.run(lambda c: c.execute(text("SELECT 7")).scalar_one()) == 7
        assert writer.pending == 0
        await until(lambda: writer.writes == 102)
        assert 0 < writer.commits < 102
        assert writer.commit_seconds.buckets()[-1][1] == writer.commits
        assert writer.commit_seconds.sum > 0


async def test_what_is_refused_comes_back_as_itself_and_alone(
    database: Database, share: Share, captured: Captured
):
    async with share() as writer:
        item = captured()
        await writer.store(item)
        first = NewReward(1.0, completion_id=item.id, idempotency_key="k")
        await writer.post_rewards("default", [first])
        again = NewReward(1.0, completion_id=item.id, idempotency_key="k")
        (stored,), fresh = await writer.post_rewards("default", [again])
        assert (stored.id, fresh) == (first.id, False)
        good = NewReward(0.0, trajectory_id="t")
        unknown = [good, NewReward(0.0, completion_id="nobody")]
        other = NewReward(2.0, completion_id=item.id, idempotency_key="k")
        broken = captured("u")
        broken.policy = None
        results = await asyncio.gather(
            writer.post_rewards("default", unknown),
            writer.post_rewards("default", [other]),
            writer.store(broken),
            writer.store(captured("v")),
            return_exceptions=True,
        )
        no_target, conflict, refused, stored = results
        assert isinstance(no_target, UnknownTarget)
        assert (no_target.index, no_target.param, no_target.name) == (1, "completion_id", "nobody")
        assert isinstance(conflict, IdempotencyConflict)
        assert (conflict.index, conflict.key) == (0, "k")
        assert isinstance(refused, DBAPIError)
        assert stored == {}
    assert (count(database, Completion), count(database, Reward)) == (2, 1)


async def test_a_turn_whose_parent_was_deleted_is_stored_whole(
    database: Database, share: Share, captured: Captured
):
    key = b"0123456789abcdef"
    async with share() as writer:
        first = captured("t", thread_key=key)
        tail = (await writer.store(first))[key]
        messages = [*first.messages, {"role": "assistant", "content": "so"}]
        later = captured("t", messages=messages, prompt_ids=[1, 2, 3, 4, 5, 6], tail=tail)
        await writer.run(lambda c: delete_trajectories(c, "default", ["t"]))
        await writer.store(later)
    with database.read() as connection:
        found = queries.completion(connection, "default", later.id)
    assert (found.messages, found.prompt_ids) == (messages, [1, 2, 3, 4, 5, 6])


async def test_a_full_queue_refuses_and_a_cancelled_caller_keeps_its_row(
    database: Database, share: Share, captured: Captured
):
    async with share(limit=3) as writer:
        waiting = [asyncio.ensure_future(writer.store(captured(f"t{i}"))) for i in range(3)]
        await asyncio.sleep(0)
        assert writer.full
        with pytest.raises(QueueFull):
            await writer.store(captured("too-many"))
        waiting[0].cancel()
    assert (writer.pending, count(database, Completion)) == (0, 3)


async def test_gateways_of_a_folder_share_one_process_and_the_next_takes_over(
    database: Database, share: Share, captured: Captured
):
    async with share(workers=2) as second, AsyncExitStack() as stack:
        await second.store(captured("a"))
        first = await stack.enter_async_context(share(workers=2))
        await first.store(captured("b"))
        assert (first.child.pid, second.child.pid is None) == (None, False)
        # Their counts are added up, and every commit is in one of them only.
        await until(lambda: second.writes == 2)
        assert (first.commits, first.writes, first.commit_seconds.sum) == (0, 0, 0.0)
        assert (first.counts_all, second.counts_all) == (False, True)
    assert count(database, Completion) == 2
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(share(workers=2))
        await first.store(captured("c"))
        async with share(workers=2) as second:
            await second.store(captured("d"))
            waiting = [asyncio.ensure_future(second.store(captured(f"e{i}"))) for i in range(50)]
            await stack.aclose()
            more = [asyncio.ensure_future(second.store(captured(f"f{i}"))) for i in range(50)]
            await asyncio.gather(*waiting, *more)
            assert second.child.pid is not None
    assert count(database, Completion) == 104


async def test_a_result_that_cannot_be_sent_is_an_error_of_its_own_caller(
    share: Share, captured: Captured
):
    async with share() as writer:
        strange = captured("s")
        strange.sampling = {"temperature": lambda: 1.0}
        results = await asyncio.gather(
            writer.store(captured("a")), writer.store(strange), return_exceptions=True
        )
        assert results[0] == {}
        assert isinstance(results[1], (pickle.PicklingError, AttributeError))
        assert writer.pending == 0


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
async def test_an_outage_goes_to_the_journal_of_the_process(
    postgres: Any, database: Database, share: Share, captured: Captured, tmp_path: Path
):
    left = Journal(tmp_path / "data" / "journal-3.db")
    left.append([("rewards", b"[]")])
    left.close()
    async with share() as writer:
        item = captured()
        await writer.store(item)
        await until(lambda: writer.journal.state()["rejected"] == 1)
        with away(postgres):
            await writer.store(captured("u"))
            posted = [NewReward(1.0, completion_id=item.id)]
            assert await writer.post_rewards("default", posted) is None
            await until(lambda: writer.journal.state()["entries"] == 2)
            assert writer.journal.state()["oldest_seconds"] < 60
        await until(lambda: writer.journal.state()["entries"] == 0)
        assert (count(database, Completion), count(database, Reward)) == (2, 1)
    with sqlite3.connect(tmp_path / "data" / "journal-3.db") as connection:
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (0,)


def test_frames_come_out_whole_however_they_are_cut():
    messages = [(i, [(i, "x" * (7 * i))]) for i in range(40)]
    stream = b"".join(framed(message) for message in messages)
    for size in (1, 3, 64, 1000, len(stream)):
        frames, found = Frames(), []
        for start in range(0, len(stream), size):
            found += frames.feed(stream[start : start + size])
        assert found == messages


def test_a_long_folder_has_its_socket_elsewhere(tmp_path: Path):
    deep = tmp_path / ("d" * 100)
    for folder in (deep, tmp_path):
        path = socket_path(Worker(folder, 2))
        assert len(str(path)) <= 104
        assert path == socket_path(Worker(folder, 2))
    assert socket_path(Worker(deep, 2)).parent.stat().st_mode & 0o077 == 0
    assert socket_path(Worker(tmp_path, 1)) != socket_path(Worker(tmp_path, 2))
