"""`POST /v1/messages`, as Anthropic's own client uses it."""

import asyncio
from itertools import pairwise

import pytest
from anthropic import APIStatusError, AsyncAnthropic, BadRequestError, NotFoundError

from gateway.api.ids import completion_id
from gateway.store import queries
from tests.gateway.conftest import Running

ASK = [{"role": "user", "content": "Say something."}]
TOOL = {
    "name": "paint",
    "description": "Paint it.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"type": "string"}},
        "required": ["colour"],
    },
}


@pytest.fixture
async def client(strop: Running):
    async with AsyncAnthropic(base_url=strop.url, api_key="none", max_retries=0) as found:
        yield found


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


async def test_a_message_is_logged_with_its_tokens_under_an_id_that_fits_it(strop, client):
    reply = await client.messages.create(
        model="agent",
        max_tokens=3,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=ASK,
        metadata={"user_id": "u1"},
    )
    assert reply.id.startswith("msg_")
    row = stored(strop, reply.id)
    ended = {"stop": "end_turn", "length": "max_tokens"}[row.choices[0].finish_reason]
    assert (reply.model, reply.stop_reason) == ("agent@0", ended)
    assert_tokens(row, reply.usage)
    assert row.messages == [{"role": "system", "content": "Be brief."}, *ASK]
    assert [b.text for b in reply.content] == [row.response["choices"][0]["message"]["content"]]
    assert row.client_metadata == {"user_id": "u1"}


async def test_a_stream_has_anthropics_events_and_is_what_is_stored(strop, client):
    kinds = []
    async with client.messages.stream(model="agent", max_tokens=30, messages=ASK) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()
    raw = [kind for kind in dict.fromkeys(kinds) if kind != "text"]
    assert raw == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    row = stored(strop, final.id)
    assert row.stream
    assert_tokens(row, final.usage)
    assert final.content[0].text == row.response["choices"][0]["message"]["content"]
    expected = {"stop": "end_turn", "length": "max_tokens"}[row.choices[0].finish_reason]
    assert final.stop_reason == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_matched_stop_sequence_is_named(strop, client, stream):
    options = {
        "model": "agent",
        "max_tokens": 200,
        "messages": ASK,
        "stop_sequences": [" red", " blue", " green", " gold"],
    }
    if stream:
        async with client.messages.stream(**options) as events:
            reply = await events.get_final_message()
    else:
        reply = await client.messages.create(**options)
    row = stored(strop, reply.id)
    reason = row.response["choices"][0].get("stop_reason")
    if not stream:
        assert reply.stop_sequence == reason
    assert (reply.stop_reason == "stop_sequence") == (reply.stop_sequence is not None)
    assert row.request["stop"] == options["stop_sequences"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_goes_out_and_its_echo_continues_the_trajectory(strop, client, stream):
    options = {"model": "agent", "max_tokens": 90, "tools": [TOOL]}
    if stream:
        async with client.messages.stream(messages=ASK, **options) as events:
            reply = await events.get_final_message()
    else:
        reply = await client.messages.create(messages=ASK, **options)
    (call,) = reply.content
    assert (call.type, call.name, call.input) == ("tool_use", "paint", {"colour": "red"})
    assert reply.stop_reason == "tool_use"
    row = stored(strop, reply.id)
    assert_tokens(row, reply.usage)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    history = [
        *ASK,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    after = await client.messages.create(messages=history, **options)
    second = stored(strop, after.id)
    assert second.trajectory_id == row.trajectory_id
    assert second.parent_id == row.id
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool"]
    assert second.messages[1]["tool_calls"][0]["id"] == call.id


async def test_echoed_text_continues_the_trajectory_token_for_token(strop, client):
    history = list(ASK)
    rows = []
    for turn in range(3):
        reply = await client.messages.create(model="agent", max_tokens=5, messages=history)
        rows.append(stored(strop, reply.id))
        history += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [{"type": "text", "text": f"And then? {turn}"}]},
        ]
    assert len({row.trajectory_id for row in rows}) == 1
    for before, after in pairwise(rows):
        sequence = before.prompt_ids + before.choices[0].token_ids
        assert after.prompt_ids[: len(sequence)] == sequence


async def test_a_thread_is_continued_with_its_system_prompt_and_tools(strop, client):
    long_name = "paint_" + "very_" * 13 + "well"
    first = await client.beta.messages.create(
        model="agent",
        max_tokens=150,
        system="Be brief.",
        tools=[{**TOOL, "name": long_name}],
        messages=ASK,
        thread={"type": "create"},
    )
    (call,) = first.content
    assert call.name == long_name
    result = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    # Another conversation that goes alike must not be taken for this one.
    thread = {"type": "continue", "previous_message_id": first.id}
    options = {"model": "agent", "max_tokens": 150, "thread": thread}
    second = await client.beta.messages.create(
        messages=[{"role": "user", "content": [result]}], **options
    )
    before, row = stored(strop, first.id), stored(strop, second.id)
    assert (row.parent_id, row.trajectory_id) == (before.id, before.trajectory_id)
    assert [m["role"] for m in row.messages] == ["system", "user", "assistant", "tool"]
    assert row.messages[3] == {
        "role": "tool",
        "tool_call_id": call.id,
        "content": "Error",
        "is_error": True,
    }
    assert row.request["tools"] == before.request["tools"]
    options["thread"] = {"type": "continue", "previous_message_id": second.id}
    third = await client.beta.messages.create(messages=ASK, **options)
    assert third.content[0].name == long_name
    assert "thread" not in strop.vllm.requests[-1]
    assert "strop" not in strop.vllm.requests[-1]


async def test_a_thread_that_is_not_there_is_refused_as_the_sdk_expects(strop, client):
    with pytest.raises(NotFoundError) as caught:
        await client.beta.messages.create(
            model="agent",
            max_tokens=4,
            messages=ASK,
            thread={"type": "continue", "previous_message_id": "msg_0"},
        )
    assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}


async def test_more_tokens_than_the_model_can_are_as_many_as_it_can(strop, client):
    reply = await client.messages.create(model="agent", max_tokens=16_384, messages=ASK)
    assert stored(strop, reply.id).request["max_tokens"] == strop.vllm.max_model_len


async def test_tokens_are_counted_as_vllm_counts_them(strop, client):
    options = {"model": "agent", "messages": ASK, "system": "Be brief.", "tools": [TOOL]}
    counted = await client.messages.count_tokens(**options)
    reply = await client.messages.create(max_tokens=4, **options)
    assert counted.input_tokens == reply.usage.input_tokens
    with pytest.raises(NotFoundError) as caught:
        await client.messages.count_tokens(model="claude-nothing", messages=ASK)
    assert caught.value.body["error"]["type"] == "not_found_error"


async def test_a_rollout_path_names_group_and_trajectory(strop):
    status, reply = await strop.post(
        "/rollouts/g7/t7/v1/messages", {"model": "agent", "messages": ASK, "max_tokens": 4}
    )
    assert status == 200
    assert stored(strop, reply["id"]).trajectory_id == "t7"


async def test_an_unknown_model_is_a_404_in_anthropics_format(client):
    with pytest.raises(NotFoundError) as caught:
        await client.messages.create(model="claude-nothing", max_tokens=4, messages=ASK)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert "agent@0" in caught.value.body["error"]["message"]


async def test_an_error_of_vllm_is_put_into_anthropics_format(strop, client):
    with pytest.raises(BadRequestError) as caught:
        await client.messages.create(
            model="agent", max_tokens=4, messages=ASK, extra_body={"temperature": -3}
        )
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert "temperature" in error["message"]
    strop.vllm.faults.status, strop.vllm.faults.status_times = 503, 1
    with pytest.raises(APIStatusError) as caught:
        await client.messages.create(model="agent", max_tokens=4, messages=ASK)
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (
        503,
        "overloaded_error",
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages.0.role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [{"name": "x"}]}, "tools.0"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"thread": {"type": "end"}}, "thread.type"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id"),
        (
            {"thread": {"type": "continue", "previous_message_id": "msg_1"}, "system": "x"},
            "system",
        ),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_a_bad_field_is_named(strop: Running, change, named):
    body = {"model": "agent", "max_tokens": 4, "messages": ASK, **change}
    status, answer = await strop.post("/v1/messages", body)
    assert status == 400
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert named in answer["error"]["message"]


async def test_a_stream_that_breaks_off_ends_in_an_error_event(strop, client):
    strop.vllm.faults.die_mid_stream = 3
    with pytest.raises(APIStatusError) as caught:
        async with client.messages.stream(model="agent", max_tokens=30, messages=ASK) as stream:
            async for event in stream:
                if event.type == "message_start":
                    name = event.message.id
    assert "broke off" in str(caught.value.body)
    assert stored(strop, name).status == "aborted"


async def test_a_client_that_hangs_up_aborts_vllm(strop, client):
    strop.vllm.faults.slow = 0.4
    stream = await client.messages.create(model="agent", max_tokens=200, messages=ASK, stream=True)
    async for event in stream:
        name = event.message.id
        break
    await stream.close()
    for _ in range(100):
        with strop.gateway.database.read() as connection:
            row = queries.completion(connection, "default", completion_id(name))
        if row is not None and strop.vllm.stats["aborted"]:
            break
        await asyncio.sleep(0.05)
    assert (row.status, row.reason) == ("aborted", "aborted")


async def test_a_reward_is_posted_against_the_id_that_the_client_holds(strop: Running):
    async with AsyncAnthropic(base_url=strop.url, api_key="none") as client:
        message = await client.messages.create(
            model="agent", max_tokens=4, messages=[{"role": "user", "content": "Hello."}]
        )
    assert message.id.startswith("msg_")
    status, body = await strop.post("/v1/rewards", {"completion_id": message.id, "reward": 1.0})
    assert (status, body["completion_id"][:9]) == (201, "chatcmpl-")
    assert (await strop.get(f"/v1/rewards?completion_id={message.id}"))[1]["data"]
    assert (await strop.get(f"/v1/chat/completions/{message.id}"))[0] == 200
