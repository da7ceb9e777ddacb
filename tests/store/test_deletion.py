"""Deleting harms nothing that stays, on SQLite and PostgreSQL."""

import asyncio
import random
from itertools import combinations

from sqlalchemy import func, insert, select

from gateway import retention
from gateway.store import Database, deletion, queries, rewards
from gateway.store import retention as kept_for
from gateway.store.models import Choice, Completion, CompletionUse, Group, Reward, Trajectory
from gateway.store.writer import Writer
from tests.store.conftest import Captured

PROJECT = "default"


async def write_thread(
    writer: Writer, captured: Captured, turns: int = 5, trajectory: str = "t", **options
) -> list[str]:
    """A thread in which each turn continues the one before; ids in order."""
    rng = random.Random(trajectory)
    prompt = [rng.randrange(50_000) for _ in range(40)]
    messages = [{"role": "user", "content": "first " * 30}]
    ids, tail = [], None
    for turn in range(turns):
        answer = [rng.randrange(50_000) for _ in range(5)]
        item = captured(
            trajectory,
            prompt_ids=list(prompt),
            answer_ids=answer,
            messages=list(messages),
            tail=tail,
            thread_key=f"{trajectory}{turn}".encode(),
            created_at=1000.0 + turn,
            **options,
        )
        tails = await writer.store(item)
        (tail,) = tails.values()
        ids.append(item.id)
        prompt += [*answer, *(rng.randrange(50_000) for _ in range(7))]
        messages += [
            {"role": "assistant", "content": f"answer {turn} " * 10},
            {"role": "user", "content": f"more {turn} " * 10},
        ]
    return ids


def read(database: Database, trajectory: str = "t"):
    with database.read() as connection:
        return queries.trajectory(connection, PROJECT, trajectory)


def delete(database: Database, ids: list[str], **options) -> deletion.Deleted:
    with database.write() as connection:
        return deletion.delete_completions(connection, PROJECT, ids, **options)


def content(trajectory) -> dict[str, tuple]:
    return {
        c.id: (c.messages, c.prompt_ids, c.request, c.choices, c.response)
        for c in trajectory.completions
    }


def count(database: Database, table) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


async def test_whatever_turns_are_deleted_the_others_read_back_the_same(
    database: Database, writer: Writer, captured: Captured
):
    turns = 5
    cases = [case for size in range(1, turns) for case in combinations(range(turns), size)]
    for number, case in enumerate(cases):
        name = f"t{number}"
        ids = await write_thread(writer, captured, turns, name)
        before = content(read(database, name))
        gone = [ids[turn] for turn in case]
        assert delete(database, gone) == deletion.Deleted(len(gone), 0)
        assert content(read(database, name)) == {
            id: whole for id, whole in before.items() if id not in gone
        }


async def test_a_turn_is_written_against_the_nearest_one_that_stays(
    database: Database, writer: Writer, captured: Captured
):
    first, second, third, fourth = await write_thread(writer, captured, 4)
    delete(database, [second, third])
    with database.read() as connection:
        row = (
            connection.execute(select(Completion.__table__).where(Completion.id == fourth))
            .mappings()
            .one()
        )
    assert (row["parent_id"], row["parent_choice"]) == (first, 0)
    assert row["messages_shared"] == 1
    assert row["prompt_shared"] == 45
    assert row["request"] is None
    delete(database, [first])
    with database.read() as connection:
        row = (
            connection.execute(select(Completion.__table__).where(Completion.id == fourth))
            .mappings()
            .one()
        )
    assert (row["parent_id"], row["messages_shared"], row["prompt_shared"]) == (None, 0, 0)
    assert row["request"] is not None


async def test_branches_of_a_deleted_turn_all_stay_whole(
    database: Database, writer: Writer, captured: Captured
):
    root = captured(thread_key=b"root", messages=[{"role": "user", "content": "root"}])
    (tail,) = (await writer.store(root)).values()
    for number in range(3):
        await writer.store(
            captured(
                prompt_ids=[1, 2, 3, 4, 5, 60 + number],
                messages=[*root.messages, {"role": "user", "content": str(number)}],
                tail=tail,
                created_at=1001.0 + number,
            )
        )
    before = content(read(database))
    delete(database, [root.id])
    del before[root.id]
    assert content(read(database)) == before


async def test_the_next_turn_continues_a_thread_with_a_hole(
    database: Database, writer: Writer, captured: Captured
):
    ids = await write_thread(writer, captured, 3)
    delete(database, [ids[1]])
    with database.read() as connection:
        tail = queries.find_tail(connection, PROJECT, [b"t2"], None)
    last = read(database).completions[-1]
    messages = [*last.messages, {"role": "user", "content": "on"}]
    prompt = [*last.prompt_ids, *last.choices[0].token_ids, 9]
    await writer.store(captured(prompt_ids=prompt, messages=messages, tail=tail, created_at=2e3))
    newest = read(database).completions[-1]
    assert (newest.messages, newest.prompt_ids) == (messages, prompt)


async def test_an_answer_that_nothing_continues_any_more_is_found_first_again(
    database: Database, writer: Writer, captured: Captured
):
    ids = await write_thread(writer, captured, 3)

    def continued() -> list[bool]:
        query = select(Choice.continued).order_by(Choice.completion_id)
        with database.read() as connection:
            return list(connection.execute(query).scalars())

    assert continued() == [True, True, False]
    delete(database, [ids[1]])
    assert continued() == [True, False]
    delete(database, [ids[2]])
    assert continued() == [False]


async def test_rewards_go_with_their_completion_and_uses_stay_as_history(
    database: Database, writer: Writer, captured: Captured
):
    first, second = await write_thread(writer, captured, 2)
    posted = [rewards.NewReward(1.0, completion_id=id) for id in (first, second)]
    with database.write() as connection:
        rewards.post(connection, PROJECT, posted)
        for id in (first, second):
            connection.execute(
                insert(CompletionUse).values(
                    step_id=1, completion_id=id, choice=0, trajectory_id="t", group_id="g", tokens=2
                )
            )
    delete(database, [first])
    assert [reward.completion_id for reward in read(database).rewards] == [second]
    assert count(database, CompletionUse) == 2
    with database.read() as connection:
        assert connection.execute(select(Trajectory.rewarded)).scalar_one()
    delete(database, [second], forget_uses=True)
    assert count(database, CompletionUse) == 1
    assert read(database) is None


async def test_a_trajectory_without_rewards_left_waits_for_one(
    database: Database, writer: Writer, captured: Captured
):
    first, _ = await write_thread(writer, captured, 2)
    with database.write() as connection:
        rewards.post(connection, PROJECT, [rewards.NewReward(1.0, completion_id=first)])
    delete(database, [first])
    with database.read() as connection:
        assert not connection.execute(select(Trajectory.rewarded)).scalar_one()


async def test_the_last_completion_takes_trajectory_and_group_with_it(
    database: Database, writer: Writer, captured: Captured
):
    ids = await write_thread(writer, captured, 2)
    other = captured("u", "g")
    await writer.store(other)
    assert delete(database, ids) == deletion.Deleted(2, 1)
    assert count(database, Group) == 1
    assert delete(database, [other.id]) == deletion.Deleted(1, 1)
    tables = (Trajectory, Completion, Choice, Reward, Group)
    assert [count(database, table) for table in tables] == [0] * len(tables)


async def test_a_group_that_a_trainer_holds_outlives_its_trajectories(
    database: Database, writer: Writer, captured: Captured
):
    await writer.store(captured())
    with database.write() as connection:
        connection.execute(Group.__table__.update().values(lease_owner="w", lease_expires=9e9))
        deletion.delete_trajectories(connection, PROJECT, ["t"])
    assert count(database, Group) == 1


async def test_deleting_is_repeatable_and_passes_over_what_is_not_there(
    database: Database, writer: Writer, captured: Captured
):
    ids = await write_thread(writer, captured, 3)
    assert delete(database, [ids[0], "nothing"]).completions == 1
    assert delete(database, [ids[0], "nothing"]) == deletion.Deleted()
    assert delete(database, []) == deletion.Deleted()
    with database.write() as connection:
        assert deletion.delete_completions(connection, "other", ids) == deletion.Deleted()
        assert deletion.delete_trajectories(connection, "other", ["t"]) == deletion.Deleted()
    assert len(read(database).completions) == 2


async def test_a_trajectory_is_deleted_whole(
    database: Database, writer: Writer, captured: Captured
):
    await write_thread(writer, captured, 3)
    kept = await write_thread(writer, captured, 2, "kept")
    with database.write() as connection:
        rewards.post(connection, PROJECT, [rewards.NewReward(1.0, trajectory_id="t")])
        deleted = deletion.delete_trajectories(connection, PROJECT, ["t"])
    assert deleted == deletion.Deleted(3, 1)
    assert [c.id for c in read(database, "kept").completions] == kept
    assert count(database, Reward) == 0


async def test_what_is_old_goes_in_small_batches_and_a_late_reward_keeps_it(
    database: Database, writer: Writer, captured: Captured
):
    for number in range(7):
        at = 1000.0 + number
        await writer.store(captured(f"t{number}", created_at=at, finished_at=at))
    with database.write() as connection:
        rewards.post(connection, PROJECT, [rewards.NewReward(1.0, trajectory_id="t0")])

    def batch() -> int:
        with database.write() as connection:
            return deletion.delete_older_than(connection, PROJECT, 1005.0, 3).trajectories

    assert [batch(), batch(), batch()] == [3, 1, 0]
    with database.read() as connection:
        left = connection.execute(select(Trajectory.id).order_by(Trajectory.id)).scalars()
        assert list(left) == ["t0", "t5", "t6"]


async def test_what_is_older_than_its_project_is_to_be_kept_is_deleted(
    database: Database, writer: Writer, captured: Captured
):
    day = 86_400.0
    for project in ("default", "other", "longer"):
        for index in range(45):
            when = day if index < 42 else 9 * day
            await writer.store(
                captured(f"t{index}", project=project, created_at=when, finished_at=when)
            )

    async def deleted(days: float | None, **by_project: float) -> int:
        return await retention.delete_once(database, writer, days, by_project, now=10 * day)

    assert await deleted(None, longer=9.5) == 0
    assert await deleted(None, other=5.0) == 42
    assert await deleted(5.0, longer=9.5) == 42
    assert await deleted(5.0, longer=9.5) == 0
    with database.read() as connection:
        for project, gone in (("default", True), ("other", True), ("longer", False)):
            assert (queries.trajectory(connection, project, "t41") is None) is gone
            assert queries.trajectory(connection, project, "t42") is not None


async def test_a_projects_own_rule_goes_before_the_settings(
    database: Database, writer: Writer, captured: Captured
):
    day = 86_400.0
    projects = ("forever", "longer", "plain", "shorter")
    for project in projects:
        for when in (day, 7 * day):
            item = captured(f"t{when:g}", project=project, created_at=when, finished_at=when)
            await writer.store(item)
    with database.write() as connection:
        for project, days in (("forever", None), ("longer", 20.0), ("shorter", 2.0)):
            kept_for.keep(connection, project, days)
    by_project = {"forever": 5.0, "shorter": 100.0}
    assert await retention.delete_once(database, writer, 5.0, by_project, now=10 * day) == 3
    with database.read() as connection:
        query = select(Trajectory.project, Trajectory.id)
        left = sorted(connection.execute(query).tuples())
        assert left == [
            ("forever", "t604800"),
            ("forever", "t86400"),
            ("longer", "t604800"),
            ("longer", "t86400"),
            ("plain", "t604800"),
        ]
        # Without a rule in the settings, only those that have one are looked at.
    assert await retention.delete_once(database, writer, None, {}, now=30 * day) == 2
    with database.write() as connection:
        kept_for.forget(connection, "forever")
    assert await retention.delete_once(database, writer, None, {}, now=30 * day) == 0
    assert await retention.delete_once(database, writer, 5.0, {}, now=30 * day) == 3


async def test_a_turn_whose_parent_was_deleted_while_it_was_answered_is_stored_whole(
    database: Database, writer: Writer, captured: Captured
):
    (first,) = await write_thread(writer, captured, 1)
    with database.read() as connection:
        tail = queries.find_tail(connection, PROJECT, [b"t0"], None)
    start = read(database).completions[0]
    delete(database, [first])
    messages = [*start.messages, {"role": "user", "content": "on"}]
    prompt = [*start.prompt_ids, *start.choices[0].token_ids, 9]
    await writer.store(captured(prompt_ids=prompt, messages=messages, tail=tail))
    (found,) = read(database).completions
    assert (found.parent_id, found.messages, found.prompt_ids) == (None, messages, prompt)
    assert found.request == {"model": "agent", "temperature": 1.0}


async def test_deleting_and_logging_at_once_damages_nothing(
    database: Database, writer: Writer, captured: Captured
):
    ids = await write_thread(writer, captured, 4)
    with database.read() as connection:
        tail = queries.find_tail(connection, PROJECT, [b"t3"], None)
    last = read(database).completions[-1]
    expected = {}
    work = []
    for number in range(20):
        messages = [*last.messages, {"role": "user", "content": str(number)}]
        prompt = [*last.prompt_ids, *last.choices[0].token_ids, number]
        item = captured(prompt_ids=prompt, messages=messages, tail=tail, created_at=2e3 + number)
        expected[item.id] = (messages, prompt)
        work.append(writer.store(item))
        if number % 5 == 0:
            work.append(asyncio.to_thread(delete, database, [ids[3 - number // 5]]))
    await asyncio.gather(*work)
    found = {c.id: (c.messages, c.prompt_ids) for c in read(database).completions}
    assert found == expected
