"""From the log to Langfuse: ids, scores, sizes, batches, and faults on the way."""

import asyncio
import json
import time
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from gateway.store import Database, outbox
from gateway.store.models import Reward, Step
from gateway.store.records import TrajectoryRef
from gateway.store.rewards import NewReward
from gateway.store.tracing_models import LangfuseTrace, OutboxEntry
from gateway.store.training import Use, _settle
from gateway.store.writer import Writer
from gateway.tracing import ids
from gateway.tracing.sender import Sender
from tests.fake_langfuse import FakeLangfuse, Fault
from tests.store.conftest import Captured
from tests.tracing.conftest import MakeSender, drain

ANSWER = {
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cost": 0.25},
}


def answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "tool_calls": None}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def lag(database: Database) -> outbox.Lag:
    with database.read() as connection:
        (found,) = outbox.lag(connection, time.time())
    return found


def placed(captured: Captured, ref: TrajectoryRef, **options: Any) -> Any:
    item = captured(**options)
    item.trajectory = ref
    return item


async def test_rewards_are_scores_and_corrections_replace_them(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    item, sub = captured("t"), placed(captured, TrajectoryRef("s", "g", "header", parent_id="t"))
    await writer.store(item)
    await writer.store(sub)

    async def post(reward: float, **options: Any) -> str:
        (stored,), _ = await writer.post_rewards("default", [NewReward(reward, **options)])
        return stored.id

    await post(0.25, completion_id=item.id, comment="meh", source="dashboard", created_at=5.0)
    await post(1.0, trajectory_id="t", name="ci")
    await post(0.0, trajectory_id="s", name="ci")
    await drain(sender)
    by = {(s["name"], s.get("observationId")): s for s in langfuse.scores.values()}
    assert len(langfuse.scores) == 3
    first = by["reward", ids.generation_id(item.id)]
    assert (first["value"], first["comment"], first["metadata"]["source"]) == (
        0.25,
        "meh",
        "dashboard",
    )
    assert first["timestamp"] == "1970-01-01T00:00:05+00:00"
    assert by["ci", None]["traceId"] == ids.trace_id("default", "t")
    assert by["ci", ids.agent_id("default", "s")]["value"] == 0.0
    corrected = await post(0.75, completion_id=item.id, comment="better")
    await drain(sender)
    now = langfuse.scores[first["id"]]
    assert (now["value"], now["comment"]) == (0.75, "better")
    assert (now["metadata"]["reward_id"], now["metadata"]["corrections"]) == (corrected, 1)
    assert len(langfuse.scores) == 3
    # Withdrawn, all of them: no score.
    with sender._database.write() as connection:
        query = update(Reward).where(Reward.completion_id == item.id)
        connection.execute(query.values(withdrawn_at=9.0))
        outbox.add(connection, outbox.REWARD, [("default", corrected)], 9.0)
    await drain(sender)
    assert first["id"] not in langfuse.scores
    assert langfuse.requests["deletes"] == 1
    # What came from Langfuse is there already.
    await post(1.0, completion_id=item.id, name="thumb", source="langfuse")
    await drain(sender)
    assert {s["name"] for s in langfuse.scores.values()} == {"ci"}


async def test_what_a_step_made_of_it_is_added_when_it_is_known(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    item, other = captured("t"), captured("u")
    for each in (item, other):
        await writer.store(each)
    await drain(sender)
    before = langfuse.generation(item.id)
    assert "step" not in before.metadata
    with sender._database.write() as connection:
        step = connection.execute(
            insert(Step)
            .values(
                project="default",
                policy="agent",
                parent_version=0,
                version=4,
                state="done",
                worker="w",
                config={},
                started_at=1.0,
            )
            .returning(Step.id)
        ).scalar_one()
        uses = [
            Use(item.id, 0, "t", "g", 1.0, 0.875, 2, None),
            Use(other.id, 0, "u", "g", 1.0, None, 0, "stale"),
        ]
        _settle(connection, "default", "agent", step, [], uses)
    await drain(sender)
    after = langfuse.generation(item.id)
    assert (after.metadata["step"], after.metadata["advantage"]) == (step, 0.875)
    assert (after.metadata["trained_version"], after.metadata["trained_tokens"]) == (4, 2)
    assert langfuse.generation(other.id).metadata["not_trained"] == "stale"
    same = ("input", "output", "type", "usage_details")
    assert [after.get(name) for name in same] == [before.get(name) for name in same]


async def test_sending_twice_changes_nothing(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    for n in range(5):
        item = captured(f"t{n % 2}", response=ANSWER)
        await writer.store(item)
        await writer.post_rewards("default", [NewReward(float(n), completion_id=item.id)])
    await drain(make_sender(batch=2))
    spans, scores = dict(langfuse.spans), [dict(s, updatedAt=0) for s in langfuse.scores.values()]
    database = writer._database
    with database.write() as connection:
        again = {"since": 0.0, "until": 2e9, "limit": 1, "now": 1.0}
        count, after = outbox.backfill(connection, "default", after="", **again)
        more, after = outbox.backfill(connection, "default", after=after, **again)
        assert (count + more, outbox.backfill(connection, "default", after=after, **again)) == (
            10,
            (0, None),
        )
    await drain(make_sender())
    assert langfuse.spans == spans
    assert [dict(s, updatedAt=0) for s in langfuse.scores.values()] == scores


async def test_large_content_is_cut_and_linked(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
    long = [
        {"role": "system", "content": "s" * 5_000_000},
        {"role": "user", "content": [{"type": "text", "text": "ü" * 2_000_000}, image]},
    ]
    many = [{"role": "user", "content": f"{n} " + "m" * 300} for n in range(20_000)]
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 2_000_000}}]
    items = [
        captured("long", messages=long, response=answer("a" * 6_000_000)),
        captured("many", messages=many, response=answer("short")),
        captured("tools", request={"model": "agent", "tools": tools}, response=ANSWER),
        captured(
            "meta",
            client_metadata={"x": "y" * 900_000},
            status="error",
            response={"error": {"message": "e" * 2_000_000}},
        ),
    ]
    for item in items:
        await writer.store(item)
    await drain(make_sender())
    system, user = langfuse.generation(items[0].id).get("input")
    assert system["content"].startswith("sss")
    assert system["content"].endswith("sss")
    assert "characters cut: http://strop.test/trajectories/long" in system["content"]
    assert "image/png;base64, 3,000,022 characters" in user["content"][1]["image_url"]["url"]
    assert "characters cut" in langfuse.generation(items[0].id).get("output")["content"]
    shown = langfuse.generation(items[1].id).get("input")
    assert shown[0]["content"].startswith("0 m")
    assert "messages left out: http://strop.test/trajectories/many" in shown[1]["content"]
    assert shown[-1]["content"].startswith("19999 m")
    assert len(shown) > 1000
    assert langfuse.generation(items[1].id).get("output")["content"] == "short"
    failed = langfuse.generation(items[3].id)
    assert (failed.status, failed.get("level")) == (2, "ERROR")
    assert max(span.bytes for span in langfuse.spans.values()) < 900_000


async def test_a_long_trajectory_stays_under_the_limit_of_a_trace(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    messages: list[Any] = []
    tail = None
    sender = make_sender(batch=20)
    items = []
    for n in range(60):
        messages = [*messages, {"role": "user", "content": f"{n} " + "q" * 6_000}]
        item = captured(
            "t",
            messages=messages,
            response=answer(f"answer {n} " + "a" * 6_000),
            created_at=1000.0 + n,
            finished_at=1000.5 + n,
            thread_key=bytes([n]),
            tail=tail,
        )
        tail = (await writer.store(item))[bytes([n])]
        messages = [*messages, {"role": "assistant", "content": f"answer {n}"}]
        items.append(item)
        if n % 20 == 19:
            await drain(sender)
    sizes = langfuse.trace_bytes()
    assert sizes.keys() == {ids.trace_id("default", "t")}
    assert 2_000_000 < sizes[ids.trace_id("default", "t")] < 4_000_000
    assert len(langfuse.spans) == 61
    assert langfuse.generation(items[5].id).get("input") == items[5].messages
    assert "http://strop.test/trajectories/t" in json.dumps(
        langfuse.generation(items[-1].id).attributes
    )
    # Whole and in one request it comes out the same.
    before = dict(langfuse.spans)
    langfuse.spans.clear()
    with writer._database.write() as connection:
        outbox.backfill(connection, "default", since=0, until=2e9, after="", limit=10, now=1.0)
    await drain(make_sender())
    assert langfuse.spans == before


async def test_batches_stay_under_langfuses_limits(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    big = [{"role": "user", "content": "b" * 600_000}]
    items = [captured(f"t{n}", messages=big if n < 10 else [], response=ANSWER) for n in range(450)]
    await asyncio.gather(*(writer.store(item) for item in items))
    comment = "c" * 9_000
    posted = [NewReward(1.0, completion_id=item.id, comment=comment) for item in items]
    await writer.post_rewards("default", posted)
    await drain(make_sender())
    assert len(langfuse.spans) == 900
    assert len(langfuse.scores) == 450
    assert max(langfuse.batches) <= 500
    assert langfuse.requests["traces"] < 60


FAULTS = [
    Fault(500),
    Fault(502),
    Fault(429, {"retry-after": "0"}),
    Fault(401),
    Fault(404),
    Fault(how="hang_up"),
    Fault(how="half"),
    Fault(how="garbage"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.how}-{f.status}")
async def test_nothing_is_lost_to_a_fault(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured, fault: Fault
):
    item = captured(response=ANSWER)
    await writer.store(item)
    await writer.post_rewards("default", [NewReward(1.0, completion_id=item.id)])
    langfuse.faults.append(fault)
    assert await asyncio.to_thread(sender.step) == 0
    assert sender.not_before > time.monotonic() or fault.how == "garbage"
    waiting = lag(sender._database)
    assert (waiting.waiting, waiting.refused) == (2, 0)
    # The same when the scores meet it, after the spans were taken.
    sender.not_before = 0.0
    langfuse.faults.clear()
    real, calls = sender._exporter.send_spans, []
    sender._exporter.send_spans = lambda spans: (
        real(spans),
        calls.append(1),
        langfuse.faults.append(fault),
    )[0]
    assert await asyncio.to_thread(sender.step) == 0
    sender._exporter.send_spans = real
    assert lag(sender._database).waiting == 1
    await drain(sender)
    assert len(langfuse.spans) == 2
    assert len(langfuse.scores) == 1
    assert lag(sender._database).waiting == 0


async def test_a_retry_waits_as_long_as_langfuse_asks_for(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    await writer.store(captured())
    langfuse.faults.append(Fault(429, {"Retry-After": "17"}))
    await asyncio.to_thread(sender.step)
    assert 15 < sender.not_before - time.monotonic() <= 17
    assert await asyncio.to_thread(sender.step) == 0
    assert langfuse.requests["traces"] == 1
    waits = []
    for _ in range(8):
        sender.not_before = 0.0
        langfuse.faults.append(Fault(503))
        await asyncio.to_thread(sender.step)
        waits.append(sender.not_before - time.monotonic())
    assert waits[-1] > 30
    assert max(waits) <= 72


async def test_one_that_is_refused_is_set_aside_and_holds_up_nobody(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    items = [captured(f"t{n}", response=ANSWER) for n in range(30)]
    for item in items:
        await writer.store(item)
        await writer.post_rewards("default", [NewReward(1.0, completion_id=item.id, name=item.id)])
    bad = items[17].id
    langfuse.refuses = lambda span: span.metadata.get("completion_id") == bad
    langfuse.refuses_score = lambda score: score["name"] == bad
    await drain(sender)
    assert len(langfuse.spans) == 59
    assert len(langfuse.scores) == 29
    found = lag(sender._database)
    assert (found.waiting, found.refused) == (0, 2)
    with sender._database.read() as connection:
        errors = set(connection.execute(select(OutboxEntry.error)).scalars())
    assert errors == {"agent is not wanted", f"{bad} is not wanted"}
    langfuse.refuses = langfuse.refuses_score = lambda thing: False
    with sender._database.write() as connection:
        assert outbox.retry_refused(connection, "default") == 2
    await drain(sender)
    assert (len(langfuse.spans), len(langfuse.scores)) == (60, 30)


async def test_a_whole_batch_that_is_bad_is_found_out_one_by_one(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    for n in range(3):
        await writer.store(captured(f"t{n}", response=ANSWER))
    langfuse.faults.append(Fault(400))
    await drain(sender)
    assert len(langfuse.spans) == 6
    assert lag(sender._database).refused == 0


async def test_what_was_deleted_before_it_was_sent_is_not_sent(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    from gateway.store import deletion

    item, other = captured("t"), captured("u")
    for each in (item, other):
        await writer.store(each)
        await writer.post_rewards("default", [NewReward(1.0, completion_id=each.id)])
    await writer.run(lambda c: deletion.delete_trajectories(c, "default", ["t"]))
    await drain(sender)
    assert {s.metadata["trajectory_id"] for s in langfuse.spans.values()} == {"u"}
    assert len(langfuse.scores) == 1
    with sender._database.read() as connection:
        rows = connection.execute(select(LangfuseTrace.trace_id, LangfuseTrace.trajectory_id)).all()
    assert rows == [(ids.trace_id("default", "u"), "u")]


async def test_a_project_without_keys_leaves_nothing_to_send(
    writer: Writer, sender: Sender, captured: Captured
):
    await writer.store(captured(project="other"))
    await writer.post_rewards("other", [NewReward(1.0, trajectory_id="t")])
    assert lag(sender._database).waiting == 0
