"""Writing and reading the trajectory database, on SQLite and PostgreSQL."""

import asyncio
import random

import pytest
from sqlalchemy import func, literal, select, update
from sqlalchemy.exc import StatementError

from gateway.store import Database, queries, rewards
from gateway.store.database import NotStorable
from gateway.store.models import Choice, Completion
from gateway.store.writer import QueueFull, Writer
from tests.store.conftest import Captured


def read(database: Database, trajectory: str):
    with database.read() as connection:
        return queries.trajectory(connection, "default", trajectory)


def tail_of(tails):
    (tail,) = tails.values()
    return tail


async def test_a_thread_stores_only_what_is_new_and_reads_back_whole(
    database: Database, writer: Writer, captured: Captured
):
    rng = random.Random(0)
    prompt = [rng.randrange(49_000) for _ in range(400)]
    messages = [{"role": "system", "content": "x" * 500}, {"role": "user", "content": "first"}]
    expected, tail = [], None
    for turn in range(32):
        answer = [rng.randrange(49_000) for _ in range(20)]
        text = " ".join(str(token) for token in answer)
        key = bytes([turn]) * 16
        tails = await writer.store(
            captured(
                prompt_ids=list(prompt),
                answer_ids=answer,
                messages=list(messages),
                tail=tail,
                thread_key=key,
                created_at=1000.0 + turn,
                response={"choices": [{"message": {"role": "assistant", "content": text}}]},
            )
        )
        tail = tail_of(tails)
        expected.append((list(prompt), list(messages)))
        prompt += answer + [rng.randrange(49_000) for _ in range(30)]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    found = read(database, "t")
    assert [(c.prompt_ids, c.messages) for c in found.completions] == expected
    assert all(c.request == {"model": "agent", "temperature": 1.0} for c in found.completions)
    with database.read() as connection:
        sizes = [
            row.prompt + row.messages + (row.request or 0)
            for row in connection.execute(
                select(
                    func.length(Completion.prompt_ids).label("prompt"),
                    func.length(Completion.messages).label("messages"),
                    func.length(Completion.request).label("request"),
                ).order_by(Completion.created_at)
            )
        ]
    # The last turn costs what the second one did, although its conversation is 16 times as long.
    assert sizes[-1] < 1.2 * sizes[1]
    with database.read() as connection:
        assert queries.find_tail(connection, "default", [bytes([31]) * 16], None) == tail


async def test_a_turn_whose_answer_was_rendered_anew_shares_the_prompt(
    database: Database, writer: Writer, captured: Captured
):
    tail = tail_of(await writer.store(captured(prompt_ids=[1, 2, 3], thread_key=b"a" * 16)))
    second = captured(prompt_ids=[1, 2, 3, 9, 9], tail=tail, created_at=1001.0)
    await writer.store(second)
    third = captured(prompt_ids=[7, 7], tail=tail, created_at=1002.0)
    await writer.store(third)
    found = read(database, "t")
    assert [c.prompt_ids for c in found.completions] == [[1, 2, 3], [1, 2, 3, 9, 9], [7, 7]]
    with database.read() as connection:
        shared = connection.execute(
            select(Completion.prompt_shared).order_by(Completion.created_at)
        ).scalars()
        assert list(shared) == [0, 3, 0]


async def test_writes_that_come_together_share_a_commit(
    database: Database, writer: Writer, captured: Captured
):
    await asyncio.gather(*(writer.store(captured(f"t{i}")) for i in range(300)))
    assert writer.writes == 300
    assert writer.commits < 100
    with database.read() as connection:
        assert queries.groups(connection, "default", now=0.0)[0].trajectories == 300


async def test_a_commit_waits_for_requests_in_progress(
    database: Database, writer: Writer, captured: Captured, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.store.writer._COMMIT_EVERY", 0.5)
    writer.in_progress = lambda: 100
    await writer.store(captured("t0"))

    async def later(i: int) -> None:
        await asyncio.sleep(0.005 * i)
        await writer.store(captured(f"t{i}"))

    await asyncio.gather(*(later(i) for i in range(1, 11)))
    assert (writer.writes, writer.commits < 6) == (11, True)
    writer.in_progress = lambda: 0
    for i in range(11, 15):
        await writer.store(captured(f"t{i}"))
    assert writer.commits >= 5


async def test_a_write_that_fails_fails_alone(
    database: Database, writer: Writer, captured: Captured
):
    def fails(connection):
        raise ZeroDivisionError

    results = await asyncio.gather(
        *(writer.store(captured(f"t{i}")) for i in range(5)),
        writer.run(fails),
        *(writer.store(captured(f"u{i}")) for i in range(5)),
        return_exceptions=True,
    )
    assert [type(r) for r in results if isinstance(r, BaseException)] == [ZeroDivisionError]
    assert all(read(database, f"{letter}{i}") for letter in "tu" for i in range(5))


async def test_a_full_queue_refuses_instead_of_growing(database: Database, captured: Captured):
    writer = Writer(database, limit=3)
    waiting = [asyncio.ensure_future(writer.store(captured(f"t{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await writer.store(captured("too-many"))
    writer.start()
    await asyncio.gather(*waiting)
    await writer.close()


async def test_a_caller_that_is_cancelled_keeps_its_row(database: Database, captured: Captured):
    writer = Writer(database)
    task = asyncio.ensure_future(writer.store(captured("gone")))
    await asyncio.sleep(0)
    task.cancel()
    writer.start()
    await writer.close()
    assert read(database, "gone") is not None


async def test_the_newest_reward_of_a_name_is_last_and_all_are_kept(
    database: Database, writer: Writer, captured: Captured
):
    item = captured()
    await writer.store(item)
    for value in (0.0, 1.0):
        new = rewards.NewReward(value, completion_id=item.id)
        await writer.run(lambda c, new=new: rewards.post(c, "default", [new]))
    found = read(database, "t")
    assert [reward.reward for reward in found.rewards] == [0.0, 1.0]


async def test_a_list_of_rewards_with_an_unknown_id_leaves_nothing(
    database: Database, writer: Writer, captured: Captured
):
    item = captured()
    await writer.store(item)
    items = [
        rewards.NewReward(1.0, completion_id=item.id),
        rewards.NewReward(1.0, completion_id="?"),
    ]
    with pytest.raises(rewards.UnknownTarget):
        await writer.run(lambda c: rewards.post(c, "default", items))
    assert read(database, "t").rewards == []


async def test_another_project_sees_nothing(database: Database, writer: Writer, captured: Captured):
    item = captured()
    await writer.store(item)
    with database.read() as connection:
        assert queries.trajectory(connection, "other", "t") is None
        assert queries.completion(connection, "other", item.id) is None
        assert queries.groups(connection, "other", now=0.0) == []
    with pytest.raises(rewards.UnknownTarget), database.write() as connection:
        rewards.post(connection, "other", [rewards.NewReward(1.0, completion_id=item.id)])


async def test_storing_a_completion_twice_changes_nothing(
    database: Database, writer: Writer, captured: Captured
):
    item = captured()
    await writer.store(item)
    await writer.store(item)
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(Completion)).scalar() == 1
        assert connection.execute(select(func.count()).select_from(Choice)).scalar() == 1


def test_what_a_database_cannot_hold_is_refused_and_character_0_replaced(database: Database):
    for value in (2**70, {"x": {1, 2}}):
        with pytest.raises((NotStorable, StatementError)) as caught, database.write() as connection:
            connection.execute(update(Completion).values(client_metadata={"x": value}))
        assert isinstance(getattr(caught.value, "orig", caught.value), NotStorable)
    with database.write() as connection:
        shown = connection.execute(
            select(literal({"a": "b\0\\u0000\\\0"}, Completion.client_metadata.type))
        )
        assert shown.scalar_one() == {"a": "b\ufffd\\u0000\\\ufffd"}


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
def test_reading_keeps_the_statements_that_postgresql_has_prepared(database: Database):
    for _ in range(10):
        with database.read() as connection:
            assert queries.trajectory(connection, "p", "t") is None
    with database.read() as connection:
        kept = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements").scalars()
        assert any("FROM trajectories" in statement for statement in kept)
