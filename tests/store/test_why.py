"""The explanation of a waiting completion, on SQLite and PostgreSQL."""

from gateway.store import Database, policies, rewards
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.why import why
from gateway.store.writer import Writer
from tests.store.conftest import Captured


async def test_a_completion_a_trajectory_and_a_group_are_explained(
    database: Database, writer: Writer, captured: Captured
):
    with database.write() as connection:
        policies.create(
            connection,
            "default",
            "agent",
            base_model="/base",
            base_served="base",
            lora=Lora(),
            settings=PolicySettings(group_size=2, deadline_seconds=1e12),
            adapter_path="/zero",
        )
    items = [captured(f"t{number}", "g") for number in range(2)]
    for item in items:
        await writer.store(item)
    new = rewards.NewReward(1.0, completion_id=items[0].id)
    await writer.run(lambda c: rewards.post(c, "default", [new]))
    with database.read() as connection:
        for id in (items[0].id, "t0", "g"):
            (found,) = why(connection, "default", id)
            assert found.state == "waiting"
            assert "has 1 of the 2 rewarded members" in " ".join(found.sentences)
            assert "no reward yet" not in " ".join(found.sentences)
        (found,) = why(connection, "default", "t1")
    assert "no reward yet" in " ".join(found.sentences)
