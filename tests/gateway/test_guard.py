"""What versions earn decides: taken back, promoted, dropped."""

import asyncio
import json
import time

import pytest

from gateway.guard import Guard
from gateway.store import claims, trials
from gateway.store.ids import new_id
from gateway.store.records import CapturedCompletion, TrajectoryRef
from gateway.store.rewards import NewReward, post
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.test_publisher import ASK, policy, served, version, write_version


async def earn(strop: Running, number: int, rewards, *, split="train", tasks=4):
    """Trajectories that began with a version, as the gateway logs them, and their rewards."""
    writer = strop.gateway.writer
    for index, reward in enumerate(rewards):
        now = time.time()
        trajectory = TrajectoryRef(new_id("t-"), f"{split}-{index % tasks}", "path", split=split)
        await writer.store(
            CapturedCompletion(
                id=new_id("chatcmpl-"),
                project="default",
                trajectory=trajectory,
                policy="agent",
                version=number,
                trained=True,
                messages=ASK,
                request={},
                stream=False,
                created_at=now,
                finished_at=now,
            )
        )
        new = NewReward(float(reward), trajectory_id=trajectory.id)
        await writer.run(lambda c, new=new: post(c, "default", [new]))


def guard_of(strop: Running) -> Guard:
    gateway = strop.gateway
    return Guard(gateway.database, gateway.writer, gateway.publisher, 3600.0)


def events(strop: Running) -> list:
    with strop.gateway.database.read() as connection:
        return trials.events(connection, "default", "agent", 100)


@pytest.fixture
async def guarded(make_strop: MakeStrop):
    """A gateway whose own guard does not look by itself, with versions 1 and 2 published."""
    async with make_strop(guard_poll=3600.0) as strop:
        for number in (1, 2):
            write_version(strop, number, parent=number - 1)
            await strop.gateway.publisher.reconcile()
        yield strop


GOOD, BAD = [1, 1, 1, 0] * 6, [0, 0, 0, 0] * 6


async def test_a_worse_version_is_taken_back_by_itself_and_the_record_says_why(guarded: Running):
    await earn(guarded, 1, GOOD)
    await earn(guarded, 2, BAD)
    await guard_of(guarded).look()
    row = policy(guarded)
    assert (row["alias"], row["head"], row["rate_factor"]) == (1, 1, 0.5)
    await guarded.gateway.publisher.reconcile()
    assert await served(guarded) == "agent@1"
    (trained,) = claims.trainable_policies(guarded.gateway.database)
    assert (trained.head, trained.rate_factor) == (1, 0.5)
    event = events(guarded)[0]
    assert (event["kind"], event["version"], event["detail"]["to"]) == ("withdrawn", 2, 1)
    why = event["detail"]["why"]
    assert why.startswith("agent@2 earned 0.000 ± 0.000 over 24 trajectories against 0.750 ± ")
    assert "worse by more than chance" in why
    assert "0.5 times the learning rate" in why
    # The version that serves again is not blamed for the one that does not.
    await guard_of(guarded).look()
    assert policy(guarded)["alias"] == 1


async def test_what_grew_from_a_version_that_is_taken_back_is_never_served(guarded: Running):
    async with guarded.gateway.publisher._turn:
        write_version(guarded, 3, parent=2)
        with guarded.gateway.database.write() as connection:
            assert trials.withdrawn(connection, "default", "agent", 2, 1, "why", {}, 0.5)
    await guarded.gateway.publisher.reconcile()
    assert version(guarded, 3)["state"] == "superseded"
    assert policy(guarded)["alias"] == 1


async def test_a_version_that_does_as_well_stays_and_the_look_is_on_record(guarded: Running):
    await earn(guarded, 1, GOOD)
    await earn(guarded, 2, GOOD)
    await guard_of(guarded).look()
    assert policy(guarded)["alias"] == 2
    looked = version(guarded, 2)
    assert looked["looks"] == 1
    assert looked["looked"]["p_worse"] > 0.3
    # No second look before there are twice as many.
    await guard_of(guarded).look()
    assert version(guarded, 2)["looks"] == 2  # 24 are more than 16
    await guard_of(guarded).look()
    assert version(guarded, 2)["looks"] == 2


async def test_held_out_rewards_count_before_those_of_training(guarded: Running):
    for number, train, held_out in ((1, BAD, GOOD), (2, GOOD, BAD)):
        await earn(guarded, number, train)
        await earn(guarded, number, held_out, split="eval")
    await guard_of(guarded).look()
    assert policy(guarded)["alias"] == 1
    assert "held-out rewards" in events(guarded)[0]["detail"]["why"]


async def test_of_several_gateways_one_acts(guarded: Running):
    await earn(guarded, 1, GOOD)
    await earn(guarded, 2, BAD)
    await asyncio.gather(*(guard_of(guarded).look() for _ in range(3)))
    row = policy(guarded)
    assert (row["alias"], row["rate_factor"]) == (1, 0.5)
    assert [event["kind"] for event in events(guarded)].count("withdrawn") == 1


async def test_a_rollback_by_hand_is_not_overruled(guarded: Running):
    await earn(guarded, 1, BAD)
    await earn(guarded, 2, GOOD)
    await guarded.post("/v1/policies/agent/rollback", {"version": 1})
    await guard_of(guarded).look()
    assert policy(guarded)["alias"] == 1


async def test_a_guard_that_is_switched_off_does_nothing(make_strop: MakeStrop):
    policies = {"agent": {"guard": {"enabled": False}}}
    async with make_strop(guard_poll=3600.0, policies=policies) as strop:
        for number in (1, 2):
            write_version(strop, number, parent=number - 1)
            await strop.gateway.publisher.reconcile()
        await earn(strop, 1, GOOD)
        await earn(strop, 2, BAD)
        await guard_of(strop).look()
        assert policy(strop)["alias"] == 2


@pytest.fixture
async def on_trial(make_strop: MakeStrop):
    """Version 1 is on trial with half of the new trajectories."""
    policies = {"agent": {"canary": {"share": 0.5, "trajectories": 24}}}
    async with make_strop(guard_poll=3600.0, policies=policies) as strop:
        write_version(strop, 1)
        await strop.gateway.publisher.reconcile()
        yield strop


async def test_a_new_version_first_gets_a_share_of_the_new_trajectories(on_trial: Running):
    row = policy(on_trial)
    assert (row["alias"], row["canary"], version(on_trial, 1)["state"]) == (0, 1, "trial")
    drawn = {}
    for number in range(24):
        header = {"X-Strop-Trajectory": f"t{number}"}
        drawn[number] = await served(on_trial, extra_headers=header)
    assert 4 < list(drawn.values()).count("agent@1") < 20
    # Sticky, and in every gateway and after a restart the same.
    on_trial.gateway.placements.__init__(on_trial.gateway.database)
    for number in range(0, 24, 5):
        header = {"X-Strop-Trajectory": f"t{number}"}
        assert await served(on_trial, extra_headers=header) == drawn[number]
    served_policy = on_trial.gateway.publisher.catalog.policies["default", "agent"]
    began = [f"agent@{served_policy.begins_with(f't{number}')}" for number in range(24)]
    assert began == list(drawn.values())
    # Visible, and training waits for the outcome.
    _, shown = await on_trial.get("/v1/policies/agent")
    assert shown["canary"]["version"] == 1
    assert shown["canary"]["share"] == 0.5
    _, ready = await on_trial.get("/readyz")
    assert ready["policies"]["agent"]["canary"] == 1
    assert claims.trainable_policies(on_trial.gateway.database) == []


async def test_a_better_version_is_promoted_at_once(on_trial: Running):
    await earn(on_trial, 0, BAD)
    await earn(on_trial, 1, GOOD[:16])
    await guard_of(on_trial).look()
    row = policy(on_trial)
    assert (row["alias"], row["canary"], version(on_trial, 1)["state"]) == (1, None, "serving")
    assert "better by more than chance" in events(on_trial)[0]["detail"]["why"]
    assert len(claims.trainable_policies(on_trial.gateway.database)) == 1


async def test_a_worse_version_is_dropped_and_the_rate_lowered(on_trial: Running):
    await earn(on_trial, 0, GOOD)
    await earn(on_trial, 1, BAD[:16])
    await guard_of(on_trial).look()
    row = policy(on_trial)
    assert (row["alias"], row["head"], row["canary"], row["rate_factor"]) == (0, 0, None, 0.5)
    assert events(on_trial)[0]["kind"] == "dropped"
    await on_trial.gateway.publisher.reconcile()
    assert {await served(on_trial) for _ in range(8)} == {"agent@0"}


async def test_one_that_is_no_worse_is_promoted_when_the_trial_is_over(on_trial: Running):
    await earn(on_trial, 0, GOOD)
    guard = guard_of(on_trial)
    await earn(on_trial, 1, GOOD[:16])
    for _ in range(3):
        await guard.look()
    assert policy(on_trial)["canary"] == 1
    await earn(on_trial, 1, GOOD[:8])
    for _ in range(3):
        await guard.look()
    assert (policy(on_trial)["alias"], policy(on_trial)["canary"]) == (1, None)
    assert "not worse by more than chance" in events(on_trial)[0]["detail"]["why"]


async def test_a_trial_is_decided_by_command_too(on_trial: Running):
    status, body = await on_trial.post("/v1/policies/agent/promote", {"version": 7})
    assert (status, body["error"]["param"]) == (400, "version")
    status, body = await on_trial.post("/v1/policies/agent/promote", {})
    assert (status, body["alias"], body["canary"]) == (200, 1, None)
    status, body = await on_trial.post("/v1/policies/agent/promote", {})
    assert (status, body["error"]["code"]) == (409, "no_trial")
    write_version(on_trial, 2, parent=1)
    await on_trial.gateway.publisher.reconcile()
    assert policy(on_trial)["canary"] == 2
    status, body = await on_trial.post("/v1/policies/agent/drop", {})
    assert (status, body["alias"], body["head"]) == (200, 1, 1)
    _, listed = await on_trial.get("/v1/policies/agent/events")
    kinds = [event["kind"] for event in listed["data"]]
    assert kinds == ["dropped", "trial_began", "promoted", "trial_began"]


async def test_a_rollback_ends_a_trial(on_trial: Running):
    status, body = await on_trial.post("/v1/policies/agent/rollback", {"version": 0})
    assert (status, body["alias"], body["canary"]) == (200, 0, None)


async def test_an_undecided_trial_ends_at_its_deadline(make_strop: MakeStrop):
    policies = {"agent": {"canary": {"share": 0.5, "deadline_seconds": 0.01}}}
    async with make_strop(guard_poll=0.05, policies=policies) as strop:
        write_version(strop, 1)
        async with asyncio.timeout(30):
            while not any(event["kind"] == "dropped" for event in events(strop)):
                await asyncio.sleep(0.02)
        assert policy(strop)["alias"] == 0
        assert json.dumps("not decided within")[1:-1] in events(strop)[0]["detail"]["why"]
