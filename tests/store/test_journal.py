"""The journal: PostgreSQL goes away and comes back, and nothing is lost, doubled or out of order."""

import asyncio
import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DataError, DBAPIError, OperationalError

from gateway.store import Database, queries
from gateway.store.ids import new_id
from gateway.store.journal import Entry, Journal, connection_lost, packed
from gateway.store.models import Choice, Completion, Reward, Trajectory
from gateway.store.records import StoredTrajectory
from gateway.store.rewards import IdempotencyConflict, NewReward, RewardList, UnknownTarget
from gateway.store.rows import encode
from gateway.store.writer import Writer
from tests.store.conftest import Captured


@contextmanager
def away(server: Any) -> Iterator[None]:
    """PostgreSQL, stopped: its connections are cut, and it takes no new ones."""
    server.stop()
    try:
        yield
    finally:
        server.ensure_postgres_running()


@pytest.fixture
def postgres_url(postgres: Any) -> Iterator[str]:
    """A PostgreSQL database of its own, without tables."""
    name = new_id("t")
    postgres.psql(f"CREATE DATABASE {name}")
    yield postgres.get_uri(name)
    postgres.psql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(postgres_url: str) -> Iterator[Database]:
    found = Database(postgres_url)
    found.migrate()
    yield found
    found.dispose()


MakeWriter = Callable[..., Any]


@pytest.fixture
def make_writer(database: Database, tmp_path: Path) -> MakeWriter:
    """`async with make_writer(name)`: a writer with the journal of that name."""

    @asynccontextmanager
    async def make(name: str = "journal", **options: Any) -> AsyncIterator[Writer]:
        writer = Writer(database, journal=Journal(tmp_path / f"{name}.db"), **options)
        writer.start()
        try:
            yield writer
        finally:
            await writer.close()

    return make


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the mover."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


async def empty(writer: Writer) -> None:
    await until(lambda: writer.journal.state()["entries"] == 0)


def read(database: Database, trajectory: str = "t") -> StoredTrajectory:
    with database.read() as connection:
        found = queries.trajectory(connection, "default", trajectory)
    assert found is not None
    return found


def count(database: Database, table: Any) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def rejected(tmp_path: Path, name: str = "journal") -> list[tuple[str, str]]:
    """Kind and reason of what the closed journal gave up."""
    connection = sqlite3.connect(tmp_path / f"{name}.db")
    found = connection.execute("SELECT kind, reason FROM rejected ORDER BY seq").fetchall()
    connection.close()
    return found


async def talk(writer: Writer, captured: Captured, turns: list[Any], **options: Any) -> None:
    """One more turn of a conversation; `turns` are those before, with the tail each left."""
    messages, prompt, tail = [], [], None
    if turns:
        before, tail = turns[-1]
        answer = {"role": "assistant", "content": f"answer {len(turns)}"}
        messages = [*before.messages, answer]
        prompt = [*before.prompt_ids, *before.choices[0].token_ids]
    number = len(turns) + 1
    key = number.to_bytes(16, "big")
    item = captured(
        messages=[*messages, {"role": "user", "content": f"question {number}"}],
        prompt_ids=[*prompt, 1000 + number],
        answer_ids=[2000 + number, 3000 + number],
        tail=tail,
        thread_key=key,
        created_at=1000.0 + number,
        **options,
    )
    turns.append((item, (await writer.store(item))[key]))


async def test_a_conversation_through_an_outage_is_there_in_order_and_once(
    postgres: Any, database: Database, make_writer: MakeWriter, captured: Captured
):
    turns: list[Any] = []
    async with make_writer() as writer:
        await talk(writer, captured, turns)
        with away(postgres):
            await talk(writer, captured, turns)
            await talk(writer, captured, turns)
            first = turns[0][0].id
            for value in (0.0, 0.5, 1.0):
                posted = [NewReward(value, completion_id=first)]
                assert await writer.post_rewards("default", posted) is None
            for _ in range(2):
                keyed = [NewReward(0.25, trajectory_id="t", name="n", idempotency_key="k")]
                assert await writer.post_rewards("default", keyed) is None
            state = writer.journal.state()
            assert (state["entries"], state["pending"], state["rejected"]) == (7, 0, 0)
            assert 0 <= state["oldest_seconds"] < 30
        await talk(writer, captured, turns)
        await empty(writer)
        await talk(writer, captured, turns)
        stored, fresh = await writer.post_rewards("default", [NewReward(2.0, trajectory_id="t")])
        assert fresh
        assert stored[0].reward == 2.0
    found = read(database)
    assert [c.id for c in found.completions] == [item.id for item, _ in turns]
    for completion, (item, _) in zip(found.completions, turns, strict=True):
        assert completion.messages == item.messages
        assert completion.prompt_ids == item.prompt_ids
        assert completion.choices[0].token_ids == item.choices[0].token_ids
    assert [reward.reward for reward in found.rewards] == [0.0, 0.5, 1.0, 0.25, 2.0]
    with database.read() as connection:
        shared = select(Completion.messages_shared, Completion.prompt_shared)
        rows = connection.execute(shared.order_by(Completion.created_at)).all()
        continued = select(Choice.continued).order_by(Choice.thread_key)
        assert connection.execute(continued).scalars().all() == [True] * 4 + [False]
        assert connection.execute(select(Trajectory.rewarded)).scalars().all() == [True]
    assert [tuple(row) for row in rows] == [(0, 0), (1, 3), (3, 6), (5, 9), (7, 12)]


async def test_many_writers_at_once_lose_nothing_when_the_connection_is_cut(
    postgres: Any, database: Database, make_writer: MakeWriter, captured: Captured
):
    acknowledged: list[str] = []
    stop = asyncio.Event()
    refused: list[BaseException] = []

    async def load(writer: Writer, worker: int) -> None:
        while not stop.is_set():
            item = captured(f"t{worker}")
            await writer.store(item)
            acknowledged.append(item.id)
            await asyncio.sleep(0.01)
            try:
                await writer.post_rewards("default", [NewReward(1.0, completion_id=item.id)])
            except Exception as error:
                refused.append(error)

    async with make_writer() as writer:
        tasks = [asyncio.create_task(load(writer, worker)) for worker in range(12)]
        for _ in range(2):
            await asyncio.sleep(0.2)
            await asyncio.to_thread(postgres.stop)
            before = len(acknowledged)
            await until(lambda before=before: len(acknowledged) > before + 100)
            await asyncio.to_thread(postgres.ensure_postgres_running)
            await until(lambda: writer.journal.waiting == 0)
        stop.set()
        await asyncio.gather(*tasks)
        await empty(writer)
    assert refused == []
    with database.read() as connection:
        stored = connection.execute(select(Completion.id)).scalars().all()
        rewarded = connection.execute(select(Reward.completion_id)).scalars().all()
    assert sorted(stored) == sorted(acknowledged)
    assert sorted(rewarded) == sorted(acknowledged)


async def test_a_crash_between_commit_and_delete_doubles_nothing(
    postgres: Any, database: Database, make_writer: MakeWriter, captured: Captured, tmp_path: Path
):
    item = captured()
    posted = [NewReward(1.0, completion_id=item.id), NewReward(0.5, trajectory_id="t")]
    with away(postgres):
        async with make_writer() as writer:
            await writer.store(item)
            await writer.post_rewards("default", posted)
        # As the disk is when the process dies after the database's commit.
        shutil.copy(tmp_path / "journal.db", tmp_path / "again.db")
    for name in ("journal", "again"):
        async with make_writer(name) as writer:
            assert writer.journal.state()["entries"] == 2
            await empty(writer)
    assert count(database, Completion) == count(database, Choice) == 1
    assert [reward.id for reward in read(database).rewards] == [reward.id for reward in posted]
    assert rejected(tmp_path) == rejected(tmp_path, "again") == []


async def test_a_commit_whose_answer_is_lost_is_stored_once(
    database: Database,
    make_writer: MakeWriter,
    captured: Captured,
    monkeypatch: pytest.MonkeyPatch,
):
    item = captured()
    async with make_writer() as writer:
        await writer.store(item)
        commit = writer.committer.transaction

        def cut(works: Any) -> Any:
            monkeypatch.undo()
            commit(works)
            raise OperationalError("COMMIT", {}, Exception(), connection_invalidated=True)

        monkeypatch.setattr(writer.committer, "transaction", cut)
        assert await writer.post_rewards("default", [NewReward(1.0, trajectory_id="t")]) is None
        await empty(writer)
    assert [reward.reward for reward in read(database).rewards] == [1.0]


async def test_a_reward_waits_for_a_completion_in_another_gateways_journal(
    postgres: Any, database: Database, make_writer: MakeWriter, captured: Captured
):
    item = captured()
    async with make_writer("b") as here:
        with away(postgres):
            async with make_writer("a") as there:
                await there.store(item)
            for value in (0.0, 1.0):
                posted = [NewReward(value, completion_id=item.id)]
                assert await here.post_rewards("default", posted) is None
        await until(lambda: here.journal.pending == 2)
        with pytest.raises(UnknownTarget):
            await here.post_rewards("default", [NewReward(0.5, completion_id=item.id)])
        # One that waits for its target keeps nothing else from the database.
        await here.store(captured("other"))
        assert here.journal.state()["entries"] == 2
        async with make_writer("a") as there:
            await empty(there)
        await empty(here)
    assert [reward.reward for reward in read(database).rewards] == [0.0, 1.0]


async def test_a_reward_whose_target_never_comes_is_rejected_and_kept(
    postgres: Any,
    database: Database,
    make_writer: MakeWriter,
    captured: Captured,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    item = captured()
    async with make_writer(journal_pending_days=1e-9) as writer:
        await writer.store(item)
        with away(postgres):
            for new in (
                NewReward(1.0, completion_id="nothing"),
                NewReward(1.0, completion_id=item.id, choice=9),
                NewReward(0.5, completion_id=item.id, idempotency_key="k"),
                NewReward(0.6, completion_id=item.id, idempotency_key="k"),
            ):
                await writer.post_rewards("default", [new])
        with caplog.at_level(logging.ERROR, "strop.journal"):
            await empty(writer)
        assert writer.journal.state()["rejected"] == 3
    assert sum("rejected" in record.message for record in caplog.records) == 3
    assert [reward.reward for reward in read(database).rewards] == [0.5]
    assert [kind for kind, _ in rejected(tmp_path)] == ["rewards"] * 3


async def test_bad_data_fails_its_caller_and_is_not_kept(
    database: Database, make_writer: MakeWriter, captured: Captured
):
    async with make_writer() as writer:
        results = await asyncio.gather(
            writer.store(captured("good")),
            writer.store(captured("bad\x00")),
            writer.post_rewards("default", [NewReward(1.0, completion_id="nothing")]),
            return_exceptions=True,
        )
        assert [type(r) for r in results[1:]] == [DataError, UnknownTarget]
        assert writer.journal.state()["entries"] == 0
    assert len(read(database, "good").completions) == 1


async def test_bad_data_that_came_during_an_outage_stops_nothing_behind_it(
    postgres: Any, database: Database, make_writer: MakeWriter, captured: Captured, tmp_path: Path
):
    async with make_writer() as writer:
        with away(postgres):
            names = ["t0", "t1", "bad\x00", "t2", "t3"]
            await asyncio.gather(*(writer.store(captured(name)) for name in names))
        await empty(writer)
    assert all(read(database, f"t{i}") for i in range(4))
    assert [kind for kind, _ in rejected(tmp_path)] == ["completion"]


async def test_other_writes_fail_while_the_database_is_away(
    postgres: Any, make_writer: MakeWriter, captured: Captured
):
    async with make_writer() as writer:
        with away(postgres):
            for _ in range(2):
                with pytest.raises(OperationalError):
                    await writer.run(lambda connection: connection.execute(text("SELECT 1")))
            kept, failed = await asyncio.gather(
                writer.store(captured()), writer.run(lambda c: None), return_exceptions=True
            )
            assert kept == {}
            assert isinstance(failed, OperationalError)
        await empty(writer)
        assert await writer.run(lambda c: c.execute(text("SELECT 7")).scalar()) == 7


async def test_nobody_waits_for_a_server_that_does_not_even_refuse(
    postgres: Any, make_writer: MakeWriter, captured: Captured
):
    async with make_writer() as writer:
        asked, answer = threading.Event(), threading.Event()

        def ping() -> None:
            asked.set()
            answer.wait()

        writer.committer.mover._ping = ping
        with away(postgres):
            await writer.store(captured())
            await until(asked.is_set)
            began = time.monotonic()
            for _ in range(20):
                await writer.store(captured())
            assert time.monotonic() - began < 1.0
        answer.set()
        await empty(writer)


def test_what_is_packed_comes_out_the_same(captured: Captured):
    item = captured(
        sampling={"bytes": {"x": "AA=="}, "temperature": 0.1},
        client_metadata={"values": "ü", "n": 1.5},
        thread_key=b"\x00\xff",
    )
    encoded = encode(item)
    encoded.tails = {}
    assert Entry(1, *packed(encoded), 0.0).work() == encoded
    posted = RewardList("p", [NewReward(0.1, completion_id="c", metadata={"a": [1]})])
    assert Entry(1, *packed(posted), 0.0).work() == posted


def test_only_a_lost_connection_counts_as_one(database: Database, tmp_path: Path):
    def error_of(engine: Database, statement: str) -> DBAPIError:
        with pytest.raises(DBAPIError) as raised, engine.read() as connection:
            connection.execute(text(statement))
        return raised.value

    for statement in ("SELECT 1 / 0", "SELECT nothing", "SELECT * FROM nowhere", "?"):
        assert not connection_lost(error_of(database, statement))
    killed = error_of(database, "SELECT pg_terminate_backend(pg_backend_pid())")
    assert connection_lost(killed)
    timed_out = "SET LOCAL statement_timeout = 1; SELECT pg_sleep(1)"
    assert not connection_lost(error_of(database, timed_out))
    nowhere = Database("postgresql://postgres@127.0.0.1:1/postgres")
    assert connection_lost(error_of(nowhere, "SELECT 1"))
    sqlite = Database(f"sqlite:///{tmp_path / 'strop.db'}")
    assert not connection_lost(error_of(sqlite, "SELECT * FROM nowhere"))
    assert not connection_lost(UnknownTarget(0, "completion_id", "?"))
    assert not connection_lost(IdempotencyConflict(0, "k"))
