"""A trajectory that is too long for one trace of Langfuse's: it goes on in a second, and a third."""

import asyncio
from typing import Any

from gateway.store import outbox
from gateway.store.records import TrajectoryRef
from gateway.store.rewards import NewReward
from gateway.store.writer import Writer
from gateway.tracing import ids
from gateway.tracing.targets import Target, target_of
from tests.fake_langfuse import FakeLangfuse
from tests.store.conftest import Captured
from tests.tracing.conftest import MakeSender, drain
from tests.tracing.test_sender import answer, placed

TURNS = 3_000
HEAVY = {
    "request": {"model": "agent", "tool_choice": "t" * 600, "stop": ["s" * 600]},
    "sampling": {f"option_{n}": "v" * 600 for n in range(3)},
    "client_metadata": {"note": "m" * 2_000},
}
"""What surrounds a completion, as large as clients make it."""


async def long_one(
    writer: Writer, captured: Captured, turns: int, size: int, name: str = "t", **values: Any
) -> list[Any]:
    """A trajectory of so many turns, each with a question and an answer of so many characters."""
    items = [
        captured(
            trajectory=name,
            messages=[{"role": "user", "content": f"{n} " + "q" * size}],
            response=answer(f"{n} " + "a" * size),
            created_at=1000.0 + n,
            finished_at=1000.5 + n,
            **values,
        )
        for n in range(turns)
    ]
    for start in range(0, turns, 250):
        await asyncio.gather(*(writer.store(item) for item in items[start : start + 250]))
    return items


def traces(langfuse: FakeLangfuse) -> list[str]:
    """The traces, in the order of their earliest generation."""
    began: dict[str, int] = {}
    for span in langfuse.spans.values():
        if span.get("type") == "generation":
            began[span.trace_id] = min(began.get(span.trace_id, span.start), span.start)
    return sorted(began, key=began.__getitem__)


async def test_thousands_of_turns_are_in_traces_that_langfuse_opens(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    items = await long_one(writer, captured, TURNS, 1_500)
    await drain(make_sender(batch=200))
    found = traces(langfuse)
    assert found == [ids.trace_id("default", "t", part) for part in range(len(found))]
    assert len(found) > 2
    sizes = langfuse.trace_bytes()
    assert max(sizes.values()) < 4_000_000
    assert min(sizes[trace] for trace in found[:-1]) > 1_500_000
    # None is missing, and each trace goes on where the one before it ends.
    by_id = {span.id: span for span in langfuse.spans.values()}
    generations = [by_id[ids.generation_id(item.id)] for item in items]
    places = [found.index(generation.trace_id) for generation in generations]
    assert places == sorted(places)
    for part, trace in enumerate(found):
        agent = by_id[ids.agent_id("default", "t", part)]
        mine = [g for g in generations if g.trace_id == trace]
        assert (agent.trace_id, agent.parent_id) == (trace, "")
        assert {g.parent_id for g in mine} == {agent.id}
        assert (agent.start, agent.end) == (mine[0].start, mine[-1].end)
        assert {g.attributes["session.id"] for g in mine} == {"g"}
        name = f"agent (part {part + 1})" if part else "agent"
        assert {g.attributes["langfuse.trace.name"] for g in mine} == {name}
    # Each part has content of its own, and not the first alone.
    first = generations[places.index(1)]
    assert (
        first.get("output")["content"]
        == items[places.index(1)].response["choices"][0]["message"]["content"]
    )


async def test_what_surrounds_a_generation_counts_too(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    await long_one(writer, captured, 800, 3_000, name="ü/" * 60, **HEAVY)
    await drain(make_sender())
    sizes = langfuse.trace_bytes()
    assert len(sizes) > 1
    assert max(sizes.values()) < 4_000_000


async def test_scores_find_their_generation_in_a_later_part_and_the_way_back(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    items = await long_one(writer, captured, 900, 10)
    sender = make_sender()
    await drain(sender)
    last = items[-1]
    trace = ids.trace_id("default", "t", 1)
    assert langfuse.generation(last.id).trace_id == trace
    posted = [NewReward(1.0, completion_id=last.id), NewReward(0.5, trajectory_id="t")]
    await writer.post_rewards("default", posted)
    await drain(sender)
    placed = {(s["traceId"], s.get("observationId")) for s in langfuse.scores.values()}
    assert placed == {
        (trace, ids.generation_id(last.id)),
        (ids.trace_id("default", "t"), None),
    }
    with writer._database.read() as connection:

        def back(observation: str | None) -> Target | None:
            return target_of(connection, "default", trace, observation)

        assert back(None) == Target("t")
        assert back(ids.agent_id("default", "t", 1)) == Target("t")
        assert back(ids.generation_id(last.id)) == Target("t", last.id)
        assert back("0" * 16) is None


async def test_sub_agents_go_on_inside_their_parents_in_every_part(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    for n in range(900):
        ref = TrajectoryRef("top", "g", "header")
        if n:
            ref = TrajectoryRef(f"sub-{n % 2}", "g-sub", "header", parent_id="top")
        await writer.store(
            placed(captured, ref, response=answer("a"), created_at=1e3 + n, finished_at=1e3 + n)
        )
    await drain(make_sender())
    assert len(langfuse.trace_bytes()) == 2
    top, sub = (ids.agent_id("default", name, 1) for name in ("top", "sub-0"))
    trace = ids.trace_id("default", "top", 1)
    assert langfuse.spans[trace, top].parent_id == ""
    assert langfuse.spans[trace, sub].parent_id == top
    # The parent says nothing in this part; its children say when it was.
    assert langfuse.spans[trace, top].get("input") is None
    assert langfuse.spans[trace, top].end == int(1899e9)


async def test_sent_once_more_all_parts_are_the_same(
    writer: Writer, make_sender: MakeSender, langfuse: FakeLangfuse, captured: Captured
):
    await long_one(writer, captured, 900, 400)
    await drain(make_sender(batch=50))
    before = dict(langfuse.spans)
    langfuse.spans.clear()
    with writer._database.write() as connection:
        outbox.backfill(connection, "default", since=0, until=2e9, after="", limit=1_000, now=1.0)
    await drain(make_sender(batch=200))
    assert langfuse.spans == before
