"""What hangs where in Langfuse: generations in agents, sub-agents in parents, a caller's own trace."""

import json

from gateway.store.records import CapturedChoice, TrajectoryRef
from gateway.store.rewards import NewReward
from gateway.store.writer import Writer
from gateway.tracing import ids
from gateway.tracing.sender import Sender
from tests.fake_langfuse import FakeLangfuse
from tests.store.conftest import Captured
from tests.tracing.conftest import drain
from tests.tracing.test_sender import ANSWER, lag, placed


async def test_a_completion_is_a_generation_in_the_agent_of_its_trajectory(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    item = captured(
        "t1",
        "g1",
        version=7,
        created_at=1000.25,
        first_token_at=1000.5,
        finished_at=1001.75,
        response=ANSWER,
        completion_tokens=2,
        sampling={"temperature": 0.7, "asked": ["temperature"]},
        request={"model": "agent", "max_tokens": 9},
    )
    await writer.store(item)
    await drain(sender)
    generation, agent = langfuse.generation(item.id), langfuse.agent("t1")
    assert len(langfuse.spans) == 2
    assert (agent.parent_id, generation.parent_id) == ("", agent.id)
    assert agent.trace_id == generation.trace_id == ids.trace_id("default", "t1")
    assert generation.id == ids.generation_id(item.id)
    assert (generation.start, generation.end) == (1000_250_000_000, 1001_750_000_000)
    assert generation.get("type") == "generation"
    assert generation.get("completion_start_time").startswith("1970-01-01T00:16:40.5")
    assert generation.get("input") == item.messages
    assert generation.get("output") == {"role": "assistant", "content": "hi"}
    assert generation.get("usage_details") == {"input": 3, "output": 2}
    assert generation.get("cost_details") == {"total": 0.25}
    assert generation.get("model.name") == "agent"
    assert generation.get("model.parameters") == {"temperature": 0.7, "max_tokens": 9}
    assert generation.attributes["langfuse.version"] == "agent@7"
    for span in (agent, generation):
        assert span.attributes["session.id"] == "g1"
        assert span.attributes["langfuse.trace.tags"] == ["policy:agent", "group:g1"]
        assert span.attributes["langfuse.trace.name"] == "agent"
    assert generation.metadata["link"] == "http://strop.test/trajectories/t1"
    assert "4, 5" not in json.dumps(generation.attributes), "token ids in a trace"
    assert lag(sender._database).waiting == 0


async def test_sub_agents_hang_in_their_parents(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    for name, parent in (("top", None), ("sub", "top"), ("subsub", "sub"), ("lost", "unknown")):
        ref = TrajectoryRef(name, f"g-{name}", "header", parent_id=parent)
        await writer.store(placed(captured, ref))
    await drain(sender)
    top, sub, subsub = (langfuse.agent(name) for name in ("top", "sub", "subsub"))
    assert (top.parent_id, sub.parent_id, subsub.parent_id) == ("", top.id, sub.id)
    assert {top.trace_id, sub.trace_id, subsub.trace_id} == {ids.trace_id("default", "top")}
    assert subsub.attributes["session.id"] == "g-top"
    assert subsub.attributes["langfuse.trace.tags"] == ["policy:agent", "group:g-subsub"]
    # Where the parent has not been seen there is a place for it, which it takes when it comes.
    unknown, lost = langfuse.agent("unknown"), langfuse.agent("lost")
    assert lost.parent_id == unknown.id
    assert unknown.get("input") is None
    await writer.store(placed(captured, TrajectoryRef("unknown", "g", "header")))
    await drain(sender)
    assert langfuse.agent("unknown").get("input") is not None


async def test_a_caller_that_traces_itself_finds_its_completions_in_its_own_trace(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    header = f"00-{trace}-{span}-01"
    joined = placed(captured, TrajectoryRef(trace, "g", "traceparent", traceparent=header))
    named = placed(captured, TrajectoryRef("named", "g", "header", traceparent=header))
    sub = placed(captured, TrajectoryRef("sub", "g", "header", parent_id=trace))
    for item in (joined, named, sub):
        await writer.store(item)
    await writer.post_rewards(
        "default",
        [
            NewReward(1.0, completion_id=joined.id),
            NewReward(0.5, trajectory_id=trace, name="whole"),
        ],
    )
    await drain(sender)
    for item in (joined, named):
        generation = langfuse.generation(item.id)
        assert (generation.trace_id, generation.parent_id) == (trace, span)
        # What the trace is called, and its session, is the caller's to say.
        assert "langfuse.trace.name" not in generation.attributes
        assert "session.id" not in generation.attributes
        assert generation.attributes["langfuse.trace.tags"] == ["policy:agent", "group:g"]
    assert [
        s.metadata["trajectory_id"] for s in langfuse.spans.values() if s.get("type") == "agent"
    ] == ["sub"]
    assert (langfuse.agent("sub").trace_id, langfuse.agent("sub").parent_id) == (trace, span)
    of = {score["name"]: score for score in langfuse.scores.values()}
    assert (of["reward"]["traceId"], of["reward"]["observationId"]) == (
        trace,
        ids.generation_id(joined.id),
    )
    assert (of["whole"]["traceId"], of["whole"].get("observationId")) == (trace, None)


async def test_several_choices_are_one_generation_and_each_has_its_own_score(
    writer: Writer, sender: Sender, langfuse: FakeLangfuse, captured: Captured
):
    texts = ("red", "blue")
    choices = [
        {"index": n, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for n, text in enumerate(texts)
    ]
    item = captured(
        response={"choices": choices},
        choices=[CapturedChoice(n, "stop", [4, n], [-0.5, -0.5], None) for n in range(2)],
    )
    await writer.store(item)
    posted = [NewReward(float(n), completion_id=item.id, choice=n) for n in range(2)]
    await writer.post_rewards("default", posted)
    await drain(sender)
    generation = langfuse.generation(item.id)
    assert [each["content"] for each in generation.get("output")] == list(texts)
    assert len(langfuse.spans) == 2
    found = {s["metadata"]["choice"]: s for s in langfuse.scores.values()}
    assert {choice: score["value"] for choice, score in found.items()} == {0: 0.0, 1: 1.0}
    assert {score["observationId"] for score in found.values()} == {generation.id}
    (corrected,), _ = await writer.post_rewards(
        "default", [NewReward(0.5, completion_id=item.id, choice=1)]
    )
    await drain(sender)
    assert len(langfuse.scores) == 2
    assert langfuse.scores[found[1]["id"]]["value"] == 0.5
    assert langfuse.scores[found[1]["id"]]["metadata"]["reward_id"] == corrected.id
