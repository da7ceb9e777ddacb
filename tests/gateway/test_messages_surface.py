"""What `POST /v1/messages` makes of requests and answers, without a server."""

from gateway.capture.translate import litellm
from gateway.capture.translate_messages import MODULE, TYPES, MessagesSurface, chat_request
from tests.gateway.test_messages import ASK, TOOL

HEAD = {"id": "chatcmpl-5", "created": 7, "model": "agent@1"}
USAGE = {"prompt_tokens": 4, "completion_tokens": 9, "total_tokens": 13}


def chunk(delta, finish_reason=None, **more):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
    return {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}


async def surface() -> MessagesSurface:
    return MessagesSurface(await litellm(MODULE), await litellm(TYPES), {})


def called(number, call_id, name="f", arguments="{}"):
    function = {"name": name, "arguments": arguments}
    return {"index": number, "id": call_id, "type": "function", "function": function}


async def test_reasoning_text_and_calls_stream_as_blocks_with_the_ids_of_vllm():
    made, events = await surface(), []
    for piece in (
        {**chunk({"role": "assistant", "content": ""}), "usage": {**USAGE, "completion_tokens": 0}},
        chunk({"reasoning": "Hm"}),
        {
            **chunk({"reasoning": "m.", "content": "Yes"}),
            "usage": {**USAGE, "completion_tokens": 2},
        },
        chunk({"content": ", so"}),
        chunk({"tool_calls": [called(0, "functions.f:0"), called(1, "functions.g:1", "g")]}),
        chunk({"content": ""}, "stop"),
        {**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": USAGE},
    ):
        events += made.chunk(piece)
    events += made.end()
    assert events[0]["message"]["id"] == "msg_5"
    assert events[0]["message"]["usage"]["input_tokens"] == 4
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["id"] for block in blocks[2:]] == ["functions.f:0", "functions.g:1"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "Hmm."
    assert "".join(d.get("text", "") for d in deltas) == "Yes, so"
    (last,) = [e for e in events if e["type"] == "message_delta"]
    assert last["delta"]["stop_reason"] == "tool_use"
    assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (4, 9)
    assert events[-1] == {"type": "message_stop"}


async def test_events_come_with_the_chunk_that_brings_them():
    made = await surface()
    made.chunk(chunk({"role": "assistant", "content": ""}))
    made.chunk(chunk({"content": "one"}))
    (event,) = made.chunk(chunk({"content": " two"}))
    assert event["delta"] == {"type": "text_delta", "text": " two"}


async def test_a_whole_answer_has_the_same_blocks():
    made = await surface()
    message = {"role": "assistant", "content": "", "reasoning": "Hm.", "reasoning_content": None}
    message["tool_calls"] = [called(0, "functions.f:0", arguments='{"a": 1}')]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    shown = made.answer({**HEAD, "choices": [choice], "usage": USAGE})
    assert [block["type"] for block in shown["content"]] == ["thinking", "tool_use"]
    assert shown["content"][0]["thinking"] == "Hm."
    assert shown["content"][1]["id"] == "functions.f:0"


async def test_what_a_request_says_reaches_vllm():
    module = await litellm(MODULE)
    request = {
        "model": "claude-like",
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "S"},
        ],
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "tool", "name": "paint", "disable_parallel_tool_use": True},
        "tools": [TOOL],
        "messages": [
            *ASK,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Well"},
                ],
            },
        ],
    }
    chat, _ = chat_request(module, request)
    assert chat["messages"] == [
        {"role": "system", "content": "S"},
        *ASK,
        {"role": "assistant", "content": "Well", "reasoning": "Hm."},
    ]
    assert chat["model"] == "claude-like"
    assert chat["reasoning_effort"] == "none"
    assert chat["parallel_tool_calls"] is False
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "paint"}}
    # The last message begins the answer.
    assert (chat["add_generation_prompt"], chat["continue_final_message"]) == (False, True)
    assert set(chat) == {
        *("model", "messages", "max_tokens", "tools", "tool_choice", "reasoning_effort"),
        *("parallel_tool_calls", "add_generation_prompt", "continue_final_message"),
    }
