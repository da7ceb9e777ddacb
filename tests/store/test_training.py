"""Claiming groups under a lease, steps and versions, on SQLite and PostgreSQL."""

import time
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.store import Database, claims, policies, queries, rewards, training
from gateway.store.models import CompletionUse, Step, Trajectory
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.writer import Writer
from tests.store.conftest import Captured


@pytest.fixture
def policy(database: Database) -> claims.TrainablePolicy:
    with database.write() as connection:
        policies.create(
            connection,
            "default",
            "agent",
            base_model="/base",
            base_served="base",
            lora=Lora(),
            settings=PolicySettings(),
            adapter_path="/zero",
        )
    (found,) = claims.trainable_policies(database)
    return found


async def fill(
    writer: Writer, captured: Captured, group: str, members: int, rewarded: int, **options
):
    ids = []
    for index in range(members):
        item = captured(f"{group}-{index}", group, **options)
        await writer.store(item)
        ids.append(item.id)
    for completion_id in ids[:rewarded]:
        new = rewards.NewReward(float(len(completion_id)), completion_id=completion_id)
        await writer.run(lambda c, new=new: rewards.post(c, "default", [new]))
    return ids


def claim(database: Database, policy, worker="w1", **options):
    defaults = {
        "limit": 10,
        "group_size": 3,
        "settle_seconds": 0.0,
        "deadline_seconds": 1e12,
        "lease_seconds": 60.0,
    }
    return claims.claim_groups(database, policy, worker, **{**defaults, **options})


async def test_a_group_is_ready_when_enough_of_it_is_rewarded(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "ready", 4, 3)
    await fill(writer, captured, "waiting", 4, 2)
    (group,) = claim(database, policy)
    assert group.id == "ready"
    assert [t.id for t in group.trajectories] == ["ready-0", "ready-1", "ready-2"]
    assert not group.final
    assert sum(bool(t.rewards) for t in group.trajectories) == 3


async def test_a_closed_or_overdue_group_is_taken_as_it_is(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "g", 2, 1)
    assert claim(database, policy) == []
    (group,) = claim(database, policy, deadline_seconds=1.0)
    assert group.final


async def test_what_was_just_touched_is_left_to_settle(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "g", 3, 3)
    assert claim(database, policy, settle_seconds=30.0) == []
    assert len(claim(database, policy)) == 1


async def test_evaluation_is_never_claimed(
    database: Database, writer: Writer, captured: Captured, policy
):
    for index in range(3):
        item = captured(f"e{index}", "g")
        item.trajectory.split = "eval"
        await writer.store(item)
        new = rewards.NewReward(1.0, completion_id=item.id)
        await writer.run(lambda c, new=new: rewards.post(c, "default", [new]))
    assert claim(database, policy) == []


async def test_a_group_belongs_to_one_worker_until_its_lease_runs_out(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "g", 3, 3)
    held = claim(database, policy)
    assert claim(database, policy, "w2") == []
    assert claims.renew_leases(database, held, "w1", 0.0) == 1
    (taken,) = claim(database, policy, "w2")
    assert claims.renew_leases(database, held, "w1", 60.0) == 0
    claims.release_groups(database, [taken], "w2")
    assert len(claim(database, policy, "w3")) == 1


def finish(database: Database, policy, step_id: int, groups, worker="w1", number=1):
    outcomes = [training.Outcome(t.id, None) for group in groups for t in group.trajectories]
    uses = [
        training.Use(t.completions[0].id, 0, t.id, group.id, 1.0, 0.5, 2, None)
        for group in groups
        for t in group.trajectories
    ]
    training.finish_step(
        database,
        policy,
        step_id,
        worker,
        number=number,
        adapter_path=Path("/adapter"),
        probe={"token_ids": [1, 2], "logprobs": [-1.0]},
        metrics={"loss": 0.0},
        groups=groups,
        outcomes=outcomes,
        uses=uses,
    )


async def test_a_step_records_its_version_and_everything_that_it_used(
    database: Database, writer: Writer, captured: Captured, policy
):
    ids = await fill(writer, captured, "g", 3, 3)
    groups = claim(database, policy)
    step_id = training.begin_step(database, policy, "w1", {"learning_rate": 1e-4})
    finish(database, policy, step_id, groups)
    with database.read() as connection:
        step = connection.execute(select(Step.__table__)).mappings().one()
        assert (step["state"], step["version"], step["parent_version"]) == ("done", 1, 0)
        version = queries.version(connection, "default", "agent", 1)
        assert (version["state"], version["parent"], version["step_id"]) == ("ready", 0, step_id)
        uses = connection.execute(select(CompletionUse.__table__)).mappings().all()
        assert {use["completion_id"] for use in uses} == set(ids)
        states = set(connection.execute(select(Trajectory.state)).scalars())
        assert states == {"used"}
        row = queries.policy(connection, "default", "agent")
        assert (row["head"], row["alias"]) == (1, 0)
    assert claim(database, policy) == []


async def test_a_step_that_lost_its_lease_is_superseded(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "g", 3, 3)
    groups = claim(database, policy, lease_seconds=0.01)
    step_id = training.begin_step(database, policy, "w1", {})
    time.sleep(0.05)
    assert len(claim(database, policy, "w2")) == 1
    with pytest.raises(training.Superseded):
        finish(database, policy, step_id, groups)
    with database.read() as connection:
        assert queries.version(connection, "default", "agent", 1) is None
        assert queries.policy(connection, "default", "agent")["head"] == 0
        assert connection.execute(select(Step.state)).scalar_one() == "superseded"


async def test_a_step_that_a_rollback_overtook_is_superseded(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "g", 3, 3)
    groups = claim(database, policy)
    finish(database, policy, training.begin_step(database, policy, "w1", {}), groups)
    (moved,) = claims.trainable_policies(database)
    await fill(writer, captured, "h", 3, 3)
    groups = claim(database, moved)
    step_id = training.begin_step(database, moved, "w1", {})
    with database.write() as connection:
        policies.rolled_back(connection, "default", "agent", 0)
    with pytest.raises(training.Superseded):
        finish(database, moved, step_id, groups, number=2)
    # Its groups wait again, for the policy as it is now.
    (again,) = claims.trainable_policies(database)
    assert again.head == 0
    assert [group.id for group in claim(database, again, "w2")] == ["h"]


async def test_a_reward_that_comes_after_all_wakes_what_was_left_out(
    database: Database, writer: Writer, captured: Captured, policy
):
    ids = await fill(writer, captured, "g", 3, 2)
    groups = claim(database, policy, deadline_seconds=1.0)
    outcomes = [
        training.Outcome(t.id, None if t.rewards else "no_reward") for t in groups[0].trajectories
    ]
    training.skip_groups(database, groups, "w1", outcomes, [])
    with database.read() as connection:
        summary = queries.groups(connection, "default", now=time.time())[0]
    assert (summary.used, summary.skipped, summary.reasons) == (2, 1, {"no_reward": 1})
    new = rewards.NewReward(1.0, completion_id=ids[2])
    await writer.run(lambda c: rewards.post(c, "default", [new]))
    (group,) = claim(database, policy, group_size=1)
    assert [t.completions[0].id for t in group.trajectories] == [ids[2]]


async def test_a_step_that_a_killed_trainer_left_is_failed_by_the_next(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "g", 3, 3)
    claim(database, policy, lease_seconds=0.05)
    left = training.begin_step(database, policy, "w1", {})
    time.sleep(0.1)
    groups = claim(database, policy, "w2")
    step_id = training.begin_step(database, policy, "w2", {})
    with database.read() as connection:
        states = dict(connection.execute(select(Step.id, Step.state)).all())
    assert states == {left: "failed", step_id: "running"}
    finish(database, policy, step_id, groups, "w2")
    training.fail_step(database, policy, step_id, "w2", groups, "the connection broke")
    with database.read() as connection:
        assert connection.execute(select(Step.state).where(Step.id == step_id)).scalar() == "done"
