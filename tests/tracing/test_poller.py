"""From Langfuse's scores to rewards: each once, edits and deletions followed."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from gateway.store import Database, deletion, queries
from gateway.store.models import Group, Reward, Trajectory
from gateway.store.records import StoredReward, TrajectoryRef
from gateway.store.rewards import NewReward
from gateway.store.tracing_models import LangfuseCursor, LangfuseScore
from gateway.store.writer import Writer
from gateway.tracing import ids
from gateway.tracing.exporter import Exporter
from gateway.tracing.poller import Poller, worth
from gateway.tracing.sender import Sender
from gateway.tracing.settings import LangfuseSettings, ScoreMap
from gateway.tracing.writes import Writes
from tests.fake_langfuse import FakeLangfuse, Fault
from tests.store.conftest import Captured
from tests.tracing.conftest import drain, keys

MAPS: dict[str, Any] = {
    "quality": {"reward": "reward", "scale": 0.25},
    "thumb": {"reward": "thumb", "scale": 2.0, "offset": -1.0},
    "tone": {"reward": "tone", "categories": {"warm": 1.0, "cold": -0.5}},
    "human": {"reward": "human", "sources": ["ANNOTATION"]},
}


class Reader:
    """A poller that looks when it is told to."""

    def __init__(self, poller: Poller, database: Database):
        self.poller, self.database = poller, database

    async def look(self, *, compare: bool = False) -> None:
        def step() -> None:
            self.poller.not_before = 0.0
            if compare:
                with self.database.write() as connection:
                    connection.execute(LangfuseCursor.__table__.update().values(compared_at=0.0))
            self.poller.step()

        await asyncio.to_thread(step)
        assert self.poller._failures == 0

    def rewards(self, trajectory: str = "t") -> list[StoredReward]:
        with self.database.read() as connection:
            return queries.rewards_of(connection, "default", trajectory, None)

    def values(self, trajectory: str = "t") -> list[tuple[str, float, str | None]]:
        found = self.rewards(trajectory)
        return [(each.name, each.reward, each.completion_id) for each in found]

    def all_rows(self) -> int:
        with self.database.read() as connection:
            return len(connection.execute(select(Reward.id)).all())


@pytest.fixture
async def logged(writer: Writer, sender: Sender, captured: Captured) -> Any:
    """A completion in the trajectory `t`, and one in its sub-agent `s`, both sent."""
    item, sub = captured("t"), captured("s")
    sub.trajectory = TrajectoryRef("s", "g", "header", parent_id="t")
    for each in (item, sub):
        await writer.store(each)
    await drain(sender)
    return item


@pytest.fixture
async def reader(database: Database, langfuse: FakeLangfuse, logged: Any) -> Any:
    exporter = Exporter(keys(langfuse), timeout=5.0)
    settings = LangfuseSettings(
        scores={name: ScoreMap(**options) for name, options in MAPS.items()},
        poll_seconds=0.01,
        compare_seconds=1000.0,
    )
    found = Reader(Poller(Writes(database), "default", exporter, settings), database)
    await found.look()
    yield found
    exporter.close()


def test_every_kind_of_score_has_its_place_on_the_scale():
    numeric, categorical = ScoreMap(scale=2.0, offset=-1.0), ScoreMap(categories={"a": 0.5})
    assert worth(numeric, "NUMERIC", 0.75) == 0.5
    assert [worth(numeric, "BOOLEAN", value) for value in (True, False)] == [1.0, -1.0]
    assert [worth(categorical, "CATEGORICAL", value) for value in ("a", "b")] == [0.5, None]
    assert worth(numeric, "TEXT", "good") is None
    assert worth(numeric, "CORRECTION", "better") is None


async def test_scores_become_rewards_of_what_they_are_on(
    reader: Reader, langfuse: FakeLangfuse, logged: Any
):
    trace, generation = ids.trace_id("default", "t"), ids.generation_id(logged.id)
    langfuse.annotate(trace, generation, value=4.0, comment="good", authorUserId="u1")
    langfuse.annotate(trace, name="thumb", dataType="BOOLEAN", value=True)
    langfuse.annotate(
        trace, generation, name="tone", dataType="CATEGORICAL", value="cold", source="EVAL"
    )
    langfuse.annotate(trace, generation, name="tone", dataType="CATEGORICAL", value="odd")
    langfuse.annotate(
        trace, ids.agent_id("default", "s"), name="thumb", dataType="BOOLEAN", value=0
    )
    langfuse.annotate(trace, name="unmapped")
    langfuse.annotate(trace, name="human", source="API")
    langfuse.annotate(trace, "f" * 16)
    langfuse.annotate("e" * 32)
    await reader.look()
    assert sorted(reader.values()) == [
        ("reward", 1.0, logged.id),
        ("thumb", 1.0, None),
        ("tone", -0.5, logged.id),
    ]
    assert reader.values("s") == [("thumb", -1.0, None)]
    (quality,) = (each for each in reader.rewards() if each.name == "reward")
    assert (quality.source, quality.comment) == ("langfuse", "good")
    assert quality.metadata is not None
    assert quality.metadata["score_name"] == "quality"
    assert (quality.metadata["score_source"], quality.metadata["author"]) == ("ANNOTATION", "u1")
    # Read again, in both ways, they are the same.
    rows = reader.all_rows()
    await reader.look()
    await reader.look(compare=True)
    assert reader.all_rows() == rows
    with reader.database.read() as connection:
        rewarded = dict(connection.execute(select(Trajectory.id, Trajectory.rewarded)).all())
    assert rewarded == {"t": True, "s": True}


async def test_own_scores_are_not_read_back(
    reader: Reader, langfuse: FakeLangfuse, writer: Writer, sender: Sender, logged: Any
):
    await writer.post_rewards("default", [NewReward(1.0, "quality", completion_id=logged.id)])
    await drain(sender)
    (score,) = langfuse.scores.values()
    assert score["name"] == "quality"
    await reader.look()
    await reader.look(compare=True)
    assert reader.all_rows() == 1
    # And what came from Langfuse is not sent back to it.
    langfuse.annotate(ids.trace_id("default", "t"), value=1.0)
    await reader.look()
    await drain(sender)
    assert reader.all_rows() == 2
    assert len(langfuse.scores) == 2


async def test_edits_and_deletions_follow(
    reader: Reader, langfuse: FakeLangfuse, writer: Writer, logged: Any
):
    await writer.post_rewards("default", [NewReward(0.1, completion_id=logged.id)])
    trace, generation = ids.trace_id("default", "t"), ids.generation_id(logged.id)
    score = langfuse.annotate(trace, generation, value=4.0)
    await reader.look()
    assert [value for _, value, _ in reader.values()] == [0.1, 1.0]
    for value, comment in ((2.0, None), (4.0, "again"), (4.0, "and again")):
        langfuse.edit(score["id"], value=value, comment=comment)
        await reader.look(compare=True)
        assert [value for _, value, _ in reader.values()] == [0.1, value / 4]
        assert reader.rewards()[-1].comment == comment
    del langfuse.scores[score["id"]]
    await reader.look()
    assert len(reader.values()) == 2, "only a comparison can see that something is gone"
    await reader.look(compare=True)
    assert [value for _, value, _ in reader.values()] == [0.1]
    with reader.database.read() as connection:
        revision = connection.execute(
            select(Trajectory.revision).where(Trajectory.id == "t")
        ).scalar_one()
    # Posted, 1.0, 0.5, 1.0, withdrawn: another comment is not another worth.
    assert revision == 5
    # Four rewards were withdrawn, and all of them are still in the log.
    assert reader.all_rows() == 5
    other = langfuse.annotate(ids.trace_id("default", "t"), ids.agent_id("default", "s"), value=0)
    await reader.look()

    def waiting() -> int:
        with reader.database.read() as connection:
            return connection.execute(select(Group.waiting).where(Group.id == "g")).scalar_one()

    before = waiting()
    del langfuse.scores[other["id"]]
    await reader.look(compare=True)
    with reader.database.read() as connection:
        row = connection.execute(
            select(Trajectory.rewarded, Trajectory.revision).where(Trajectory.id == "s")
        ).one()
    assert (before, waiting()) == (2, 1)
    assert row.rewarded is False
    # Five of its parent, while it had none of its own, and two of its own.
    assert row.revision == 7


async def test_a_score_that_is_moved_or_renamed_is_not_taken_for_deleted(
    reader: Reader, langfuse: FakeLangfuse, logged: Any
):
    score = langfuse.annotate(ids.trace_id("default", "t"), value=4.0)
    await reader.look()
    before = datetime.now(UTC) - timedelta(days=400)
    langfuse.edit(score["id"], timestamp=before.isoformat())
    await reader.look(compare=True)
    assert len(reader.values()) == 1


async def test_another_langfuse_under_the_same_address_withdraws_nothing(
    reader: Reader, langfuse: FakeLangfuse, logged: Any, caplog: pytest.LogCaptureFixture
):
    for n in range(30):
        langfuse.annotate(ids.trace_id("default", "t"), value=n)
    await reader.look()
    kept = dict(langfuse.scores)
    langfuse.scores.clear()
    await reader.look(compare=True)
    assert len(reader.values()) == 30
    assert "No reward is withdrawn" in caplog.text
    langfuse.scores.update(list(kept.items())[:27])
    await reader.look(compare=True)
    assert len(reader.values()) == 27


async def test_all_pages_are_read_and_late_scores_are_found(
    reader: Reader, langfuse: FakeLangfuse, logged: Any
):
    langfuse.page = 7
    trace = ids.trace_id("default", "t")
    for n in range(40):
        langfuse.annotate(trace, value=n)
    await reader.look()
    assert sorted(value for _, value, _ in reader.values()) == [n / 4 for n in range(40)]
    late = datetime.now(UTC) - timedelta(minutes=5)
    langfuse.annotate(trace, value=100.0, timestamp=late.isoformat())
    await reader.look()
    assert len(reader.values()) == 41
    very_late = datetime.now(UTC) - timedelta(days=3)
    langfuse.annotate(trace, value=101.0, timestamp=very_late.isoformat())
    await reader.look()
    assert len(reader.values()) == 41
    await reader.look(compare=True)
    assert len(reader.values()) == 42


FAULTS = [Fault(500), Fault(429, {"retry-after": "1"}), Fault(401), Fault(400),
          Fault(how="hang_up"), Fault(how="half"), Fault(how="garbage")]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.how}-{f.status}")
@pytest.mark.parametrize("page", [1, 3])
async def test_a_fault_in_the_middle_takes_nothing_twice_and_withdraws_nothing(
    reader: Reader, langfuse: FakeLangfuse, logged: Any, fault: Fault, page: int
):
    langfuse.page = 2
    for n in range(6):
        langfuse.annotate(ids.trace_id("default", "t"), value=n)
    good = Fault(how="none")
    langfuse.faults.extend([good] * (page - 1) + [fault])
    reader.poller.not_before = 0.0
    await asyncio.to_thread(reader.poller.step)
    assert reader.poller._failures == 1
    assert len(reader.values()) == 2 * (page - 1)
    with reader.database.write() as connection:
        connection.execute(LangfuseCursor.__table__.update().values(compared_at=0.0))
    langfuse.faults.extend([good] * (page - 1) + [fault])
    reader.poller.not_before = 0.0
    await asyncio.to_thread(reader.poller.step)
    assert reader.poller._failures == 2
    await reader.look(compare=True)
    assert sorted(value for _, value, _ in reader.values()) == [n / 4 for n in range(6)]
    assert reader.all_rows() == 6


async def test_two_readers_take_a_score_once(
    database: Database, reader: Reader, langfuse: FakeLangfuse, logged: Any
):
    exporter = Exporter(keys(langfuse))
    poller = Poller(Writes(database), "default", exporter, reader.poller._settings)
    other = Reader(poller, database)
    for n in range(50):
        langfuse.annotate(ids.trace_id("default", "t"), value=n)
    await asyncio.gather(reader.look(), other.look())
    exporter.close()
    assert reader.all_rows() == 50


async def test_scores_of_what_was_deleted_hold_up_no_others(
    reader: Reader, langfuse: FakeLangfuse, writer: Writer, logged: Any
):
    trace = ids.trace_id("default", "t")
    langfuse.annotate(trace, ids.generation_id(logged.id))
    langfuse.annotate(trace)
    await reader.look()
    assert len(reader.values()) == 2
    await writer.run(lambda c: deletion.delete_trajectories(c, "default", ["t"]))
    langfuse.annotate(trace, value=3.0)
    langfuse.edit(next(iter(langfuse.scores)), value=2.0)
    langfuse.annotate(
        trace, ids.agent_id("default", "s"), name="thumb", dataType="BOOLEAN", value=1
    )
    await reader.look(compare=True)
    assert reader.values() == []
    assert reader.values("s") == [("thumb", 1.0, None)]


async def test_a_changed_scale_changes_the_rewards(
    reader: Reader, langfuse: FakeLangfuse, logged: Any
):
    langfuse.annotate(ids.trace_id("default", "t"), value=4.0)
    await reader.look()
    reader.poller._settings.scores["quality"] = ScoreMap(reward="other", scale=1.0)
    await reader.look(compare=True)
    assert reader.values() == [("other", 4.0, None)]
    reader.poller._settings.scores["quality"] = ScoreMap(reward="other", sources=["EVAL"])
    await reader.look(compare=True)
    assert reader.values() == []
    with reader.database.read() as connection:
        assert connection.execute(select(LangfuseScore.reward_id)).scalars().all() == [None]


async def test_a_score_that_corrects_a_posted_reward_is_shown_as_its_value(
    reader: Reader, langfuse: FakeLangfuse, writer: Writer, sender: Sender, logged: Any
):
    await writer.post_rewards("default", [NewReward(0.5, completion_id=logged.id)])
    await drain(sender)
    own = next(iter(langfuse.scores))
    score = langfuse.annotate(ids.trace_id("default", "t"), ids.generation_id(logged.id), value=4.0)
    await reader.look()
    await drain(sender)
    assert langfuse.scores[own]["value"] == 1.0
    del langfuse.scores[score["id"]]
    await reader.look(compare=True)
    await drain(sender)
    assert langfuse.scores[own]["value"] == 0.5


async def test_scores_are_not_asked_for_where_none_is_mapped(
    database: Database, langfuse: FakeLangfuse
):
    exporter = Exporter(keys(langfuse))
    poller = Poller(Writes(database), "default", exporter, LangfuseSettings())
    await asyncio.to_thread(poller.step)
    assert langfuse.requests["lists"] == 0
    exporter.close()
