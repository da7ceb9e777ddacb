"""What a policy's versions earned."""

import pytest

from gateway.store import Database, policies, statistics
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import CapturedChoice
from gateway.store.rewards import NewReward
from gateway.store.writer import Writer
from tests.store.conftest import Captured


async def test_a_trajectory_is_worth_its_turns_and_the_mean_of_alternatives(
    database: Database, writer: Writer, captured: Captured
):
    with database.write() as connection:
        policies.create(
            connection,
            "default",
            "agent",
            base_model="base",
            base_served="base",
            lora=Lora(),
            settings=PolicySettings(reward_weights={"tone": 0.5}),
            adapter_path=None,
        )
    four = [CapturedChoice(i, "stop", [4, i], [-0.5, -0.5]) for i in range(4)]
    plain, several = captured("plain"), captured("several", choices=four, version=1)
    for item in (plain, several):
        await writer.store(item)
    posted = [
        NewReward(1.0, completion_id=plain.id),
        NewReward(2.0, completion_id=plain.id, name="tone"),
        NewReward(0.25, trajectory_id="plain"),
        NewReward(9.0, completion_id=several.id, choice=0),
        NewReward(1.0, completion_id=several.id, choice=0),
        NewReward(0.0, completion_id=several.id, choice=1),
        NewReward(1.0, completion_id=several.id, choice=2),
        NewReward(2.0, completion_id=several.id, choice=2, name="tone"),
    ]
    for reward in posted:
        await writer.post_rewards("default", [reward])
    with database.read() as connection:
        found = statistics.rewards_by_version(connection, "default", "agent")
    assert [(one.version, one.trajectories) for one in found] == [(0, 1), (1, 1)]
    assert [one.mean for one in found] == [pytest.approx(2.25), pytest.approx(1.0)]
