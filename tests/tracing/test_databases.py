"""The whole round, out and in, on SQLite and on PostgreSQL."""

import asyncio
import time

from gateway.store import Database, leases, outbox, queries
from gateway.store.rewards import NewReward
from gateway.store.writer import Writer
from gateway.tracing import ids
from gateway.tracing.exporter import Exporter
from gateway.tracing.poller import Poller
from gateway.tracing.sender import Sender
from gateway.tracing.settings import LangfuseSettings, ScoreMap
from gateway.tracing.writes import Writes, relax
from tests.fake_langfuse import FakeLangfuse
from tests.store.conftest import Captured
from tests.tracing.conftest import PAGE, drain, keys


def test_what_a_step_made_is_noted_only_while_somebody_sends(empty_url: str):
    database = Database(empty_url)
    database.migrate()

    def noted(completion: str, now: float) -> bool:
        with database.write() as connection:
            outbox.add_where_traced(connection, "p", [completion], now)
            return completion in [each.ref for each in outbox.pending(connection, "p", 99)]

    def told(now: float) -> None:
        with database.write() as connection:
            outbox.trace_project(connection, "p", now)

    week = outbox.TRACED_SECONDS
    assert not noted("a", 1.0), "it was never traced"
    told(10.0)
    assert noted("b", 10.0)
    told(100.0)
    assert noted("c", week + 50.0), "its gateway may be away for long"
    assert not noted("d", week + 100.0)
    told(2 * week)
    assert noted("e", 2 * week + 1.0)
    with database.write() as connection:
        assert outbox.forget_project(connection, "p", 2) == 2
        assert outbox.forget_project(connection, "p", 2) == 1
        assert outbox.forget_project(connection, "p", 2) == 0
    assert not noted("f", 2 * week + 2.0)
    database.dispose()


async def test_out_and_in_again(empty_url: str, langfuse: FakeLangfuse, captured: Captured):
    database = Database(empty_url)
    database.migrate()
    relax(database)
    writer = Writer(database, traced=["default"])
    writer.start()
    items = [captured(f"t{n}") for n in range(5)]
    await asyncio.gather(*(writer.store(item) for item in items))
    await writer.post_rewards("default", [NewReward(1.0, completion_id=items[0].id)])
    await writer.close()
    exporter, writes = Exporter(keys(langfuse)), Writes(database)
    sender = Sender(writes, "default", exporter, PAGE)
    sender.start()
    sender.start()
    with database.read() as connection:
        (before,) = outbox.lag(connection, time.time())
    assert (before.waiting, before.oldest_seconds < 60) == (6, True)
    await drain(sender)
    assert (len(langfuse.spans), len(langfuse.scores)) == (10, 1)
    settings = LangfuseSettings(scores={"quality": ScoreMap(reward="q")}, compare_seconds=1e-9)
    poller = Poller(writes, "default", exporter, settings)
    score = langfuse.annotate(ids.trace_id("default", "t1"), ids.generation_id(items[1].id))
    seen = []
    for value in (1.0, 0.5, None):
        if value is None:
            del langfuse.scores[score["id"]]
        else:
            langfuse.edit(score["id"], value=value)
        poller.not_before = 0.0
        await asyncio.to_thread(poller.step)
        with database.read() as connection:
            found = queries.rewards_of(connection, "default", "t1", None)
        seen.append([(reward.name, reward.reward, reward.completion_id) for reward in found])
    assert seen == [[("q", 1.0, items[1].id)], [("q", 0.5, items[1].id)], []]
    with database.write() as connection:
        assert leases.take(connection, "x", "elsewhere/1/1", 10.0, 0.0)
        assert not leases.take(connection, "x", "elsewhere/1/2", 10.0, 5.0)
        assert leases.take(connection, "x", "elsewhere/1/2", 10.0, 11.0)
        backfilled = outbox.backfill(
            connection, "default", since=0.0, until=2e9, after="", limit=100, now=1.0
        )
        assert backfilled == (8, None)
    await drain(sender)
    assert (len(langfuse.spans), len(langfuse.scores)) == (10, 1)
    writes.close()
    exporter.close()
    database.dispose()
