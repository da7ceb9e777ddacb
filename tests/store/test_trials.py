"""Trials, withdrawals, pauses, forks and the lease on a policy, on SQLite and PostgreSQL."""

import time

import pytest
from sqlalchemy import insert, select, update

from gateway.store import Database, claims, policies, policy_leases, queries, training, trials
from gateway.store.models import Group, Policy, Version
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.writer import Writer
from tests.store.conftest import Captured
from tests.store.test_training import fill


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
            settings=PolicySettings(canary={"share": 0.5}),
            adapter_path="/zero",
            base_digest="d1",
        )
    return trainable(database)[0]


def trainable(database: Database):
    return claims.trainable_policies(database)


def written(database: Database, number: int, parent: int = 0) -> None:
    with database.write() as connection:
        connection.execute(
            insert(Version).values(
                project="default",
                policy="agent",
                number=number,
                parent=parent,
                state="ready",
                adapter_path=f"/adapter-{number}",
                probe={"token_ids": [1, 2], "logprobs": [-1.0], "previous_logprobs": [-2.0]},
                created_at=1.0,
            )
        )
        connection.execute(update(Policy).values(head=number))


def row(database: Database, name: str = "agent"):
    with database.read() as connection:
        return queries.policy(connection, "default", name)


def states(database: Database, name: str = "agent"):
    with database.read() as connection:
        found = queries.versions(connection, "default", name)
    return [version["state"] for version in found]


def kinds(database: Database):
    with database.read() as connection:
        return [e["kind"] for e in trials.events(connection, "default", "agent", 10)]


def test_one_version_at_a_time_is_on_trial(database: Database, policy):
    written(database, 1)
    written(database, 2, parent=1)
    # Nothing is trained while one waits for its trial, or is on it.
    assert trainable(database) == []
    with database.write() as connection:
        assert trials.on_trial(connection, "default", "agent", 1, {"seconds": 1}, 0.5)
        assert not trials.on_trial(connection, "default", "agent", 2, {}, 0.5)
        assert not trials.promoted(connection, "default", "agent", 2, "why", {})
    assert (row(database)["canary"], states(database)) == (1, ["serving", "trial", "ready"])
    assert trainable(database) == []
    with database.write() as connection:
        assert trials.promoted(connection, "default", "agent", 1, "good", {"p": 0.1})
        assert not trials.promoted(connection, "default", "agent", 1, "good", {})
        assert trials.on_trial(connection, "default", "agent", 2, {}, 0.5)
        assert trials.dropped(connection, "default", "agent", 2, "bad", {}, 0.5)
    found = row(database)
    assert (found["alias"], found["head"], found["canary"], found["rate_factor"]) == (
        1,
        1,
        None,
        0.5,
    )
    assert kinds(database) == ["dropped", "trial_began", "promoted", "trial_began"]
    assert trainable(database)[0].rate_factor == 0.5


def test_a_look_is_taken_once(database: Database, policy):
    with database.write() as connection:
        assert trials.looked(connection, "default", "agent", 0, 0, {"p_worse": 0.5})
        assert not trials.looked(connection, "default", "agent", 0, 0, {"p_worse": 0.1})
    with database.read() as connection:
        version = queries.version(connection, "default", "agent", 0)
    assert (version["looks"], version["looked"]) == (1, {"p_worse": 0.5})


def test_a_version_is_withdrawn_only_while_it_serves(database: Database, policy):
    written(database, 1)
    written(database, 2, parent=1)
    with database.write() as connection:
        policies.published(connection, "default", "agent", 1, {})
        assert not trials.withdrawn(connection, "default", "agent", 0, 0, "why", {}, 0.5)
        assert trials.withdrawn(connection, "default", "agent", 1, 0, "why", {}, 0.5)
        assert not trials.withdrawn(connection, "default", "agent", 1, 0, "why", {}, 0.5)
    found = row(database)
    assert (found["alias"], found["head"], found["rate_factor"]) == (0, 0, 0.5)
    assert states(database) == ["serving", "serving", "superseded"]


def test_pausing_and_resuming(database: Database, policy):
    with database.write() as connection:
        assert trials.paused(connection, "default", "agent", "enough")
        assert not trials.paused(connection, "default", "agent", "again")
    assert trainable(database) == []
    assert row(database)["state_reason"] == "enough"
    with database.write() as connection:
        assert trials.resumed(connection, "default", "agent", 0.25)
        assert not trials.resumed(connection, "default", "agent", 0.5)
    assert (row(database)["state"], row(database)["rate_factor"]) == ("active", 0.5)


def test_a_fork_takes_everything_along_but_the_version_before(database: Database, policy):
    written(database, 1)
    with database.write() as connection:
        connection.execute(update(Policy).values(rate_factor=0.5))
        assert trials.forked(connection, "default", "agent", 1, "b", "/copy")
        assert not trials.forked(connection, "default", "agent", 1, "b", "/copy")
    found = row(database, "b")
    assert (found["forked_from"], found["base_digest"], found["rate_factor"]) == (
        "agent@1",
        "d1",
        0.5,
    )
    assert (found["alias"], found["head"], states(database, "b")) == (0, 0, ["serving"])
    with database.read() as connection:
        version = queries.version(connection, "default", "b", 0)
    assert version["probe"] == {"token_ids": [1, 2], "logprobs": [-1.0]}
    forked = next(p for p in trainable(database) if p.name == "b")
    assert (forked.forked, forked.head_path) == (True, "/copy")


CLAIM = {"limit": 1, "group_size": 3, "settle_seconds": 0.0, "deadline_seconds": 1e12}


async def test_the_lease_on_a_policy_brings_a_dead_trainers_groups_along(
    database: Database, writer: Writer, captured: Captured, policy
):
    for number, group in enumerate(("a", "b")):
        await fill(writer, captured, group, 3, 3, created_at=1000.0 + number)

    def claim(worker, seconds=60.0):
        found = trainable(database)[0]
        return [
            group.id
            for group in claims.claim_groups(
                database, found, worker, **CLAIM, lease_seconds=seconds, exclusive=True
            )
        ]

    assert claim("w1") == ["a"]
    assert trainable(database)[0].held_by == "w1"
    # The other group is free, the policy is not.
    assert claim("w2") == []
    with database.write() as connection:
        connection.execute(update(Policy).values(lease_expires=time.time() - 1))
    # The dead trainer's own lease on its group has not run out, and its group comes first again.
    assert claim("w2") == ["a"]
    with database.read() as connection:
        owners = dict(connection.execute(select(Group.id, Group.lease_owner)).all())
    assert owners == {"a": "w2", "b": None}
    assert not policy_leases.hold(database, policy, "w1", 60.0)
    policy_leases.release(database, policy, "w1")
    assert trainable(database)[0].held_by == "w2"


async def test_a_policy_that_moved_on_is_not_claimed_from_where_it_was(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "a", 3, 3)
    with database.write() as connection:
        connection.execute(update(Policy).values(head=4))
    assert not claims.claim_groups(
        database, policy, "w1", **CLAIM, lease_seconds=60.0, exclusive=True
    )


async def test_steps_that_are_undone_are_counted_and_end_in_a_pause(
    database: Database, writer: Writer, captured: Captured, policy
):
    await fill(writer, captured, "a", 3, 3)
    for _ in range(2):
        groups = claims.claim_groups(database, policy, "w1", **CLAIM, lease_seconds=60.0)
        step = training.begin_step(database, policy, "w1", {})
        training.fail_step(
            database, policy, step, "w1", groups, "nan.", reason="not_finite", pause_after=2
        )
    found = row(database)
    assert (found["state"], found["strikes"]) == ("paused", 2)
    assert "2 steps in a row were undone, the last because of this: nan." in found["state_reason"]
    with database.read() as connection:
        (summary,) = queries.groups(connection, "default", now=time.time())
    assert (summary.state, summary.reasons) == ("open", {"not_finite": 3})
