"""What waits in groups, on SQLite and PostgreSQL."""

import random
import time

from sqlalchemy import Connection, select, update

from gateway.store import Database, claims, deletion, queries, rewards, training
from gateway.store.models import Group, Trajectory
from gateway.store.records import CapturedChoice, CapturedCompletion
from gateway.store.writer import Writer
from tests.store import test_training
from tests.store.conftest import Captured

claim, policy = test_training.claim, test_training.policy


def test_groups_of_before_know_what_waits_in_them(empty_url: str):
    database = Database(empty_url)
    database.migrate("0007")
    members = [
        ("full", "train", "true", "open", 10.0),
        ("full", "train", "true", "open", 7.0),
        ("full", "train", "false", "open", 5.0),
        ("full", "eval", "true", "open", 1.0),
        ("full", "train", "true", "used", 2.0),
        ("done", "train", "true", "skipped", 3.0),
    ]
    with database.write() as connection:
        for group in ("full", "done"):
            connection.exec_driver_sql(
                "insert into groups (project, policy, id, created_at, updated_at) "
                f"values ('default', 'agent', '{group}', 1.0, 2.0)"
            )
        for number, (group, split, rewarded, state, created_at) in enumerate(members):
            connection.exec_driver_sql(
                "insert into trajectories (project, id, policy, group_id, split, attribution, "
                "rewarded, state, created_at, updated_at) values ('default', "
                f"'t{number}', 'agent', '{group}', '{split}', 'path', {rewarded}, '{state}', "
                f"{created_at}, 11.0)"
            )
    database.migrate("0008")
    query = "select id, waiting, oldest_at, choices from groups order by id"
    with database.read() as connection:
        found = [tuple(row) for row in connection.exec_driver_sql(query)]
    assert found == [("done", 0, None, None), ("full", 2, 5.0, None)]
    database.dispose()


def several(captured: Captured, trajectory: str, n: int = 4, group: str = "task-x", **options):
    item = captured(
        trajectory,
        group,
        choices=[CapturedChoice(i, "stop", [4, i], [-0.5, -0.5]) for i in range(n)],
        **options,
    )
    item.trajectory.task = "x"
    return item


async def rate(writer: Writer, *values: rewards.NewReward) -> None:
    await writer.post_rewards("default", values)


def choice(item: CapturedCompletion, index: int, value: float = 1.0) -> rewards.NewReward:
    return rewards.NewReward(value, completion_id=item.id, choice=index)


def listed(database: Database) -> dict[str, queries.GroupSummary]:
    with database.read() as connection:
        found = queries.groups(connection, "default", now=time.time())
    return {group.id: group for group in found}


async def test_choices_that_are_rewarded_one_by_one_are_a_group_of_their_own(
    database: Database, writer: Writer, captured: Captured, policy
):
    item, sibling = several(captured, "t"), several(captured, "u")
    for each in (item, sibling):
        await writer.store(each)
    await rate(writer, rewards.NewReward(1.0, completion_id=sibling.id))
    await rate(writer, choice(item, 0), choice(item, 1, 0.0), choice(item, 0, 0.5))
    name = f"choices-{item.id}"
    found = listed(database)
    assert set(found) == {name, "task-x"}
    own = found[name]
    assert (own.choices, own.waiting, own.trajectories, own.task) == (4, 2, 1, "x")
    assert (found["task-x"].choices, found["task-x"].waiting) == (None, 1)
    # Neither the policy's quorum nor all of its choices.
    assert claim(database, policy, group_size=5) == []
    await rate(writer, choice(item, 2), choice(item, 3))
    (group,) = claim(database, policy, group_size=5)
    assert (group.id, group.by_choice, group.final) == (name, True, False)
    assert [t.id for t in group.trajectories] == ["t"]
    assert listed(database)[name].state == "claimed"
    # The next turn of the trajectory stays with it, and leaves no empty group behind.
    await writer.store(several(captured, "t"))
    assert listed(database)[name].trajectories == 1


async def test_a_group_of_choices_is_ready_by_quorum_by_deadline_and_when_it_is_closed(
    database: Database, writer: Writer, captured: Captured, policy
):
    item = several(captured, "t", created_at=time.time())
    await writer.store(item)
    await rate(writer, choice(item, 0), choice(item, 3))
    name = f"choices-{item.id}"
    assert set(listed(database)) == {name}
    for options, final in (
        ({"group_size": 2}, False),
        ({"deadline_seconds": 0.0, "group_size": 5}, True),
    ):
        (group,) = claim(database, policy, **options)
        assert (group.id, group.final) == (name, final)
        claims.release_groups(database, [group], "w1")
    assert claim(database, policy, group_size=5) == []
    with database.write() as connection:
        connection.execute(update(Group).where(Group.id == name).values(closed_at=time.time()))
    (group,) = claim(database, policy, group_size=5)
    assert group.final


async def test_a_single_choice_or_a_group_with_a_name_is_left_where_it_is(
    database: Database, writer: Writer, captured: Captured, policy
):
    single, named = several(captured, "t", 1), several(captured, "u", 3, "mine")
    for item in (single, named):
        await writer.store(item)
        await rate(writer, choice(item, 0))
    assert set(listed(database)) == {"task-x", "mine"}
    await rate(writer, choice(named, 1, 0.0))
    # Its choices count as members there, too.
    assert listed(database)["mine"].waiting == 2
    (group,) = claim(database, policy, group_size=2)
    assert (group.id, group.by_choice) == ("mine", False)


async def test_choices_rewarded_while_a_trainer_holds_them_stay_held(
    database: Database, writer: Writer, captured: Captured, policy
):
    item = several(captured, "t", 2)
    await writer.store(item)
    await rate(writer, rewards.NewReward(1.0, completion_id=item.id))
    (held,) = claim(database, policy, group_size=1)
    await rate(writer, choice(item, 0), choice(item, 1))
    assert claim(database, policy, "w2", group_size=1) == []
    training.skip_groups(database, [held], "w1", [training.Outcome("t", "too_few")], [])
    later = time.time() + 100
    with database.write() as connection:
        connection.execute(update(Group).values(lease_expires=later - 200))
    assert claim(database, policy, "w2", group_size=1) == []


async def test_too_few_ready_groups_are_not_taken_unless_one_can_get_no_more(
    database: Database, writer: Writer, captured: Captured, policy
):
    for number in range(2):
        item = captured(f"t{number}", f"g{number}", created_at=time.time())
        await writer.store(item)
        await rate(writer, rewards.NewReward(1.0, completion_id=item.id))
    assert claim(database, policy, group_size=1, at_least=3) == []
    assert {group.state for group in listed(database).values()} == {"open"}
    with database.write() as connection:
        connection.execute(update(Group).where(Group.id == "g0").values(closed_at=time.time()))
    assert len(claim(database, policy, group_size=1, at_least=3)) == 2


async def test_what_a_group_says_of_itself_is_never_too_little(
    database: Database, writer: Writer, captured: Captured, policy
):
    draw = random.Random(7)
    logged: list[CapturedCompletion] = []

    def exact(connection: Connection) -> dict[str, tuple[int, float]]:
        rows = connection.execute(
            select(Trajectory.group_id, Trajectory.rewarded, Trajectory.created_at).where(
                Trajectory.state == "open", Trajectory.split == "train"
            )
        )
        found: dict[str, tuple[int, float]] = {}
        for group, rewarded, at in rows:
            count, oldest = found.get(group, (0, at))
            found[group] = (count + rewarded, min(oldest, at))
        return found

    for step in range(60):
        act = draw.choice(["log", "log", "rate", "rate", "settle", "delete"])
        if act == "log" or not logged:
            item = captured(f"t{draw.randrange(8)}", "g0", created_at=1000.0 - step)
            item.trajectory.group_id = f"g{int(item.trajectory.id[1:]) % 3}"
            await writer.store(item)
            logged.append(item)
        elif act == "rate":
            values = [rewards.NewReward(1.0, completion_id=draw.choice(logged).id)]
            await rate(writer, *values)
        elif act == "settle":
            for group in claim(database, policy, group_size=1, limit=1):
                outcomes = [
                    training.Outcome(t.id, draw.choice([None, "no_reward", "stale"]))
                    for t in group.trajectories
                    if draw.random() < 0.7
                ]
                training.skip_groups(database, [group], "w1", outcomes, [])
        else:
            gone = logged.pop(draw.randrange(len(logged)))
            await writer.run(
                lambda c, gone=gone: deletion.delete_completions(c, "default", [gone.id])
            )
        with database.read() as connection:
            said = {
                row.id: (row.waiting, row.oldest_at) for row in connection.execute(select(Group))
            }
            for group, (count, oldest) in exact(connection).items():
                waiting, since = said[group]
                assert waiting >= count, (step, act)
                assert since is not None, (step, act)
                assert since <= oldest, (step, act)
