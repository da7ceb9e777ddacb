"""`POST /v1/responses`, as OpenAI's own client uses it."""

import asyncio

import orjson
import pytest
from openai import BadRequestError, NotFoundError

from gateway.api.ids import completion_id, response_id
from gateway.capture.translate import litellm
from gateway.capture.translate_responses import MODULE
from gateway.capture.translate_responses_events import ResponsesSurface
from gateway.store import queries
from tests.gateway.conftest import Running

TOOL = {
    "type": "function",
    "name": "paint",
    "description": "Paint it.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"type": "string"}},
        "required": ["colour"],
    },
}


def stored(strop: Running, name: str):
    with strop.gateway.database.read() as connection:
        found = queries.completion(connection, "default", completion_id(name))
    assert found is not None
    return found


def assert_tokens(row, usage):
    assert row.reason is None
    assert len(row.prompt_ids) == usage.input_tokens
    (choice,) = row.choices
    assert len(choice.token_ids) == len(choice.logprobs) == usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


async def test_a_response_is_logged_with_its_tokens_under_an_id_that_fits_it(strop: Running):
    reply = await strop.client.responses.create(
        model="agent",
        instructions="Be brief.",
        input="Say something.",
        max_output_tokens=6,
        metadata={"group_id": "g"},
        store=False,
    )
    assert reply.id.startswith("resp_")
    row = stored(strop, reply.id)
    assert response_id(row.id) == reply.id
    assert_tokens(row, reply.usage)
    assert row.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say something."},
    ]
    assert reply.output_text == row.response["choices"][0]["message"]["content"]
    assert (reply.model, reply.instructions, reply.store) == ("agent@0", "Be brief.", False)
    assert reply.metadata == {"group_id": "g"}
    (message,) = reply.output
    assert message.id.startswith("msg_")
    assert completion_id(message.id) == row.id


async def test_an_answer_that_was_cut_off_is_incomplete(strop: Running):
    for stream in (False, True):
        reply = await strop.client.responses.create(
            model="agent", input="Go on.", max_output_tokens=2, stream=stream
        )
        if stream:
            last = [event async for event in reply][-1]
            assert last.type == "response.incomplete"
            reply = last.response
        assert reply.status == "incomplete"
        assert reply.incomplete_details.reason == "max_output_tokens"
        assert reply.output[0].status == "incomplete"


async def test_a_stream_has_openais_events_and_ends_with_what_is_stored(strop: Running):
    events = []
    async with strop.client.responses.stream(
        model="agent", input="Say something.", max_output_tokens=30
    ) as stream:
        async for event in stream:
            events.append(event)
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[:5] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ]
    assert kinds[5:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert final.output_text == text
    assert final.output[0].id == events[2].item.id
    assert final.id == events[0].response.id
    row = stored(strop, final.id)
    assert row.stream
    assert row.response["choices"][0]["message"]["content"] == text
    assert_tokens(row, final.usage)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_goes_out_and_its_output_comes_back(strop: Running, stream):
    options = {"model": "agent", "input": "Paint!", "tools": [TOOL]}
    if stream:
        async with strop.client.responses.stream(**options) as events:
            done = [e async for e in events if e.type == "response.function_call_arguments.done"]
            reply = await events.get_final_response()
        assert [e.name for e in done] == ["paint"]
    else:
        reply = await strop.client.responses.create(**options)
    (call,) = reply.output
    assert (call.type, call.name, call.status) == ("function_call", "paint", "completed")
    assert orjson.loads(call.arguments) == {"colour": "red"}
    row = stored(strop, reply.id)
    assert_tokens(row, reply.usage)
    # What costs tokens is what the client wrote.
    assert row.request["tools"] == [
        {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
    ]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    after = await strop.client.responses.create(
        model="agent", previous_response_id=reply.id, input=[output], tools=[TOOL]
    )
    row = stored(strop, after.id)
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool"]
    assert row.messages[1]["tool_calls"][0]["id"] == call.call_id
    assert row.parent_id == completion_id(reply.id)
    assert after.output_text
    echoed = await strop.client.responses.create(
        model="agent",
        input=[{"role": "user", "content": "Paint!"}, *reply.output, output],
        tools=[TOOL],
    )
    assert stored(strop, echoed.id).trajectory_id == row.trajectory_id
    assert stored(strop, echoed.id).prompt_ids == row.prompt_ids


async def test_previous_response_id_continues_the_conversation_and_its_trajectory(strop: Running):
    first = await strop.client.responses.create(
        model="agent", instructions="One.", input="Hello.", max_output_tokens=5
    )
    # Another conversation that begins alike must not be taken for this one.
    await strop.client.responses.create(
        model="agent", instructions="One.", input="Hello.", max_output_tokens=5
    )
    second = await strop.client.responses.create(
        model="agent",
        instructions="One.",
        input="And then?",
        previous_response_id=first.id,
        max_output_tokens=5,
    )
    assert second.previous_response_id == first.id
    row, before = stored(strop, second.id), stored(strop, first.id)
    assert row.trajectory_id == before.trajectory_id
    assert row.parent_id == before.id
    assert row.messages[:2] == before.messages
    assert row.messages[2] == {"role": "assistant", "content": first.output_text}
    sequence = before.prompt_ids + before.choices[0].token_ids
    assert row.prompt_ids[: len(sequence)] == sequence
    third = await strop.client.responses.create(
        model="agent", input="And?", previous_response_id=second.id, max_output_tokens=5
    )
    row = stored(strop, third.id)
    assert [m["role"] for m in row.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert row.trajectory_id == before.trajectory_id


async def test_a_rollout_path_names_group_and_trajectory(strop: Running):
    status, reply = await strop.post(
        "/rollouts/g7/t7/v1/responses", {"model": "agent", "input": "Hi.", "max_output_tokens": 4}
    )
    assert status == 200
    assert stored(strop, reply["id"]).trajectory_id == "t7"


async def test_sampling_fields_of_vllm_are_passed_on(strop: Running):
    reply = await strop.client.responses.create(
        model="agent", input="Hi.", max_output_tokens=4, temperature=0.5, extra_body={"top_k": 3}
    )
    row = stored(strop, reply.id)
    assert (row.sampling["temperature"], row.sampling["top_k"]) == (0.5, 3)
    assert row.reason == "biased_sampling"
    assert reply.temperature == 0.5


async def test_an_unknown_previous_response_is_refused_as_openai_does(strop: Running):
    with pytest.raises(BadRequestError) as caught:
        await strop.client.responses.create(
            model="agent", input="x", previous_response_id="resp_0000"
        )
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_an_unknown_model_is_a_404(strop: Running):
    with pytest.raises(NotFoundError) as caught:
        await strop.client.responses.create(model="gpt-nothing", input="x")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": {}}]}]},
            "input[0].content[0].text",
        ),
        ({"input": "x", "tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"input": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [5]}, "tools[0].type"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "instructions": ["x"]}, "instructions"),
        ({"input": "x", "text": "json"}, "text"),
        ({"input": "x", "metadata": []}, "metadata"),
        ({"input": "x", "stream": "yes"}, "stream"),
        ({"input": "x", "temperature": "hot"}, "temperature"),
    ],
)
async def test_a_bad_field_is_named(strop: Running, body, param):
    status, answer = await strop.post("/v1/responses", {"model": "agent", **body})
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param


async def test_a_stream_that_breaks_off_fails_in_an_event(strop: Running):
    strop.vllm.faults.die_mid_stream = 3
    stream = await strop.client.responses.create(model="agent", input="Hi.", stream=True)
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert "broke off" in last.response.error.message
    assert stored(strop, last.response.id).status == "aborted"


async def test_a_client_that_hangs_up_aborts_vllm(strop: Running):
    strop.vllm.faults.slow = 0.4
    stream = await strop.client.responses.create(model="agent", input="Hi.", stream=True)
    async for event in stream:
        name = event.response.id
        break
    await stream.close()
    for _ in range(100):
        with strop.gateway.database.read() as connection:
            row = queries.completion(connection, "default", completion_id(name))
        if row is not None and strop.vllm.stats["aborted"]:
            break
        await asyncio.sleep(0.05)
    assert (row.status, row.reason) == ("aborted", "aborted")


HEAD = {"id": "chatcmpl-5", "created": 7, "model": "agent@1"}
USAGE = {"prompt_tokens": 4, "completion_tokens": 9, "total_tokens": 13}


def chunk(delta, finish_reason=None):
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


async def test_reasoning_custom_tools_and_mixed_chunks_stream_as_what_they_are():
    module = await litellm(MODULE)
    surface = ResponsesSurface(
        module, {"tools": [{"type": "custom", "name": "shell"}, {**TOOL, "name": "f"}]}
    )
    shell = {"name": "shell", "arguments": '{"content": "ls"}'}
    events = []
    for piece in (
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "Hm"}),
        chunk({"reasoning": "m.", "content": "Yes"}),
        chunk({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": shell}]}),
        chunk(
            {
                "tool_calls": [
                    {"index": 1, "id": "b", "function": {"name": "f", "arguments": "{"}},
                    {"index": 1, "function": {"arguments": "}"}},
                ]
            },
            "tool_calls",
        ),
        {**HEAD, "choices": [], "usage": USAGE},
    ):
        events += surface.chunk(piece)
    events += surface.end()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == [
        "reasoning",
        "message",
        "custom_tool_call",
        "function_call",
    ]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert done[2]["input"] == "ls"
    assert done[3]["arguments"] == "{}"
    assert events[-1]["type"] == "response.completed"
    # The whole is made by LiteLLM, the parts are made here: they must say the same.
    assert events[-1]["response"]["output"] == done
    assert events[-1]["response"]["usage"]["output_tokens"] == 9
