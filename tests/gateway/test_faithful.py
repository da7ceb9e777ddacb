"""What goes in reaches vLLM, and what comes out is said alike at once and in a stream."""

from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import BadRequestError
from pydantic import BaseModel

from gateway.api.ids import completion_id
from gateway.store import queries
from tests.clients.conftest import CHAT_TOOLS
from tests.clients.test_anthropic import MESSAGES_TOOLS
from tests.clients.test_openai import RESPONSES_TOOLS
from tests.gateway.conftest import Running

ASK: Any = [{"role": "user", "content": "Do both together."}]
IMAGE = "data:image/png;base64,iVBORw0KGgo="


class Colour(BaseModel):
    """What an answer is parsed into."""

    name: str


@pytest.fixture
async def anthropic(strop: Running):
    async with AsyncAnthropic(base_url=strop.url, api_key="none", max_retries=0) as found:
        yield found


def stored(strop: Running, name: str):
    with strop.gateway.database.read() as connection:
        found = queries.completion(connection, "default", completion_id(name))
    assert found is not None
    return found


def without(value: Any, *names: str) -> Any:
    """A value without the fields that differ from one answer to the next."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, dict):
        return {
            k: without(v, *names)
            for k, v in value.items()
            if k not in names and v not in (None, "")
        }
    return [without(v, *names) for v in value] if isinstance(value, list) else value


CASES = [
    pytest.param(ASK, True, id="tools"),
    pytest.param([{"role": "user", "content": "Say something."}], False, id="text"),
]


@pytest.mark.parametrize(("messages", "tools"), CASES)
async def test_a_chat_stream_adds_up_to_the_answer(strop: Running, messages, tools):
    strop.vllm.thoughts, strop.vllm.cached_tokens = "red or blue", 3
    options: Any = {"model": "agent", "messages": messages, "seed": 1, "logprobs": True}
    options |= {"tools": CHAT_TOOLS} if tools else {}
    whole = await strop.client.chat.completions.create(**options)
    async with strop.client.chat.completions.stream(
        stream_options={"include_usage": True}, **options
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    varying = ("id", "index", "stop_reason", "parsed_arguments", "refusal")
    for shown, expected in zip(final.choices, whole.choices, strict=True):
        shown, expected = without(shown, *varying), without(expected, *varying)
        assert shown.pop("logprobs") == expected.pop("logprobs")
        assert shown == expected
    assert without(final.usage) == without(whole.usage)
    assert whole.usage.prompt_tokens_details.cached_tokens == 3
    row, other = stored(strop, final.id), stored(strop, whole.id)
    for name in ("token_ids", "logprobs", "finish_reason"):
        assert getattr(row.choices[0], name) == getattr(other.choices[0], name)
    # What is kept of a stream is what is kept of an answer.
    kept, expected = row.response["choices"][0], other.response["choices"][0]
    assert kept.get("stop_reason") == expected.get("stop_reason")
    assert without(kept["message"], "id", "index") == without(expected["message"], "id", "index")


@pytest.mark.parametrize(("messages", "tools"), CASES)
async def test_the_events_of_a_response_add_up_to_it(strop: Running, messages, tools):
    strop.vllm.thoughts, strop.vllm.cached_tokens = "red or blue", 3
    options: Any = {"model": "agent", "input": messages, "extra_body": {"seed": 1}}
    options |= {"tools": RESPONSES_TOOLS} if tools else {}
    whole = await strop.client.responses.create(**options)
    events: Any = []
    async with strop.client.responses.stream(**options) as stream:
        async for event in stream:
            events.append(event)
        final = await stream.get_final_response()
    varying = ("id", "call_id", "created_at", "completed_at", "parsed_arguments")
    assert without(final, *varying) == without(whole, *varying)
    expected = ["reasoning", *(["function_call"] * 2 if tools else ["message"])]
    assert [item.type for item in whole.output] == expected
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # Item after item, each begun, filled and ended, with nothing of another in between.
    inside = events[2:-1]
    for index, item in enumerate(final.output):
        own = [event for event in inside if event.output_index == index]
        assert inside[: len(own)] == own
        del inside[: len(own)]
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in own))
        filled = {
            "reasoning": ["content_part.added", "reasoning_text.delta", "reasoning_text.done"],
            "message": ["content_part.added", "output_text.delta", "output_text.done"],
            "function_call": ["function_call_arguments.delta", "function_call_arguments.done"],
        }[item.type]
        filled += [] if item.type == "function_call" else ["content_part.done"]
        assert kinds == ["output_item.added", *filled, "output_item.done"]
        said = "".join(event.delta for event in own if event.type.endswith("delta"))
        assert said == (item.arguments if tools and index else item.content[0].text)
        assert without(own[-1].item, *varying) == without(item, *varying)
        assert {own[0].item.id, own[-1].item.id} == {item.id}
    assert not inside


@pytest.mark.parametrize(("messages", "tools"), CASES)
async def test_the_events_of_a_message_add_up_to_it(
    strop: Running, anthropic: AsyncAnthropic, messages, tools
):
    strop.vllm.thoughts, strop.vllm.cached_tokens = "red or blue", 3
    options: Any = {"model": "agent", "messages": messages, "max_tokens": 400}
    options |= {"extra_body": {"seed": 1}, **({"tools": MESSAGES_TOOLS} if tools else {})}
    whole = await anthropic.messages.create(**options)
    events: Any = []
    async with anthropic.messages.stream(**options) as stream:
        async for event in stream:
            # The SDK adds events of its own making between those that were sent.
            if event.type.startswith(("message_", "content_block_")):
                events.append(event)
        final = await stream.get_final_message()
    assert without(final, "id") == without(whole, "id")
    blocks = ["thinking", *(["tool_use"] * 2 if tools else ["text"])]
    assert [block.type for block in whole.content] == blocks
    begun = events[0].message
    assert (events[0].type, begun.content, begun.stop_reason) == ("message_start", [], None)
    # `input_tokens` are those that were not in the cache.
    row = stored(strop, whole.id)
    assert begun.usage.input_tokens == row.prompt_tokens
    for usage in (whole.usage, final.usage):
        assert usage.cache_read_input_tokens == 3
        assert usage.input_tokens + usage.cache_read_input_tokens == row.prompt_tokens
    assert whole.usage.output_tokens == row.completion_tokens
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    kinds = [(event.type.removeprefix("content_block_"), event.index) for event in events[1:-2]]
    places = [index for _, index in kinds]
    assert places == sorted(places)
    for index in range(len(blocks)):
        own = [kind for kind, place in kinds if place == index]
        assert own == ["start", *["delta"] * (len(own) - 2), "stop"]
        assert len(own) > 2


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_those_that_were_asked_for(strop: Running, stream: bool):
    options: Any = {"model": "agent", "messages": ASK, "n": 2, "stream": stream}
    for asked, tops in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ):
        reply = await strop.client.chat.completions.create(**options, **asked)
        chunks = [chunk async for chunk in reply] if stream else [reply]
        shown: dict[int, list[Any]] = {0: [], 1: []}
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            assert "token_ids" not in (choice.model_extra or {})
            if choice.logprobs is not None:
                shown[choice.index] += choice.logprobs.content
        assert all("prompt_token_ids" not in (chunk.model_extra or {}) for chunk in chunks)
        for choice in stored(strop, chunks[0].id).choices:
            found = shown[choice.index]
            if tops is None:
                assert not found
                continue
            assert [one.logprob for one in found] == pytest.approx(choice.logprobs, abs=1e-5)
            assert all(len(one.top_logprobs) == tops and one.bytes for one in found)
    with pytest.raises(BadRequestError) as caught:
        await strop.client.chat.completions.create(top_logprobs=2, **options)
    assert caught.value.param == "top_logprobs"


async def test_choices_that_are_streamed_side_by_side_are_kept_apart(strop: Running):
    texts, usage = ["", "", ""], None
    async for chunk in await strop.client.chat.completions.create(
        model="agent", messages=ASK, n=3, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    row = stored(strop, chunk.id)
    assert [c["message"]["content"] for c in row.response["choices"]] == texts
    assert sum(len(c.token_ids) for c in row.choices) == usage.completion_tokens
    assert row.reason is None


async def test_what_strop_does_not_know_is_vllms(strop: Running, anthropic: AsyncAnthropic):
    more = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}, "priority": 3}
    more |= {"stop_token_ids": [7], "logit_bias": {"5": 1.0}, "vllm_xargs": {"a": 1}}
    await strop.client.chat.completions.create(model="agent", messages=ASK, extra_body=more)
    await strop.client.responses.create(model="agent", input=ASK, extra_body=more)
    await anthropic.messages.create(model="agent", max_tokens=9, messages=ASK, extra_body=more)
    for seen in list(strop.vllm.requests)[-3:]:
        assert {name: seen.get(name) for name in more} == more


async def test_images_reach_vllm_and_are_not_trained_on(strop: Running, anthropic: AsyncAnthropic):
    text, url = {"type": "text", "text": "What is it?"}, {"url": IMAGE, "detail": "low"}
    chat = await strop.client.chat.completions.create(
        model="agent",
        messages=[{"role": "user", "content": [text, {"type": "image_url", "image_url": url}]}],
    )
    response = await strop.client.responses.create(
        model="agent",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is it?"},
                    {"type": "input_image", "image_url": IMAGE, "detail": "low"},
                ],
            }
        ],
    )
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    message = await anthropic.messages.create(
        model="agent",
        max_tokens=9,
        messages=[{"role": "user", "content": [text, {"type": "image", "source": source}]}],
    )
    for reply, seen in zip((chat, response, message), list(strop.vllm.requests)[-3:], strict=True):
        (said,) = seen["messages"]
        assert [part["type"] for part in said["content"]] == ["text", "image_url"]
        assert said["content"][1]["image_url"]["url"] == IMAGE
        assert stored(strop, reply.id).reason == "multimodal"
        assert stored(strop, reply.id).choices[0].token_ids


async def test_a_format_is_asked_for_in_every_surfaces_way(
    strop: Running, anthropic: AsyncAnthropic
):
    chat = await strop.client.chat.completions.parse(
        model="agent", messages=ASK, response_format=Colour
    )
    response = await strop.client.responses.parse(model="agent", input=ASK, text_format=Colour)
    message = await anthropic.messages.parse(
        model="agent", max_tokens=90, messages=ASK, output_format=Colour
    )
    assert chat.choices[0].message.parsed == Colour(name="red")
    assert response.output_parsed == Colour(name="red")
    assert message.parsed_output == Colour(name="red")
    for reply, seen in zip((chat, response, message), list(strop.vllm.requests)[-3:], strict=True):
        assert seen["response_format"]["json_schema"]["schema"]["required"] == ["name"]
        assert stored(strop, reply.id).reason == "biased_sampling"


async def test_streamed_tool_calls_without_their_ids_are_not_trained_on(strop: Running):
    options: Any = {"model": "agent", "messages": ASK, "tools": CHAT_TOOLS, "stream": True}
    for broken in (False, True):
        strop.vllm.faults.drop_ids_of_calls = broken
        async for chunk in await strop.client.chat.completions.create(
            stream_options={"include_usage": True}, **options
        ):
            usage = chunk.usage
        row = stored(strop, chunk.id)
        (choice,) = row.choices
        assert row.reason == ("no_token_ids" if broken else None)
        assert len(choice.logprobs) == usage.completion_tokens
        assert (len(choice.token_ids or ()) == usage.completion_tokens) is not broken
        assert len(row.response["choices"][0]["message"]["tool_calls"]) == 2


async def test_models_are_listed_for_both_kinds_of_client(
    strop: Running, anthropic: AsyncAnthropic
):
    names = [model.id async for model in strop.client.models.list()]
    assert names[:1] == ["agent"]
    models = [model async for model in anthropic.models.list()]
    assert [model.id for model in models] == names
    assert all(model.type == "model" and model.display_name for model in models)
    assert (await anthropic.models.retrieve("agent")).created_at.year >= 2024


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_that_ended_an_answer_is_kept(strop: Running, stream: bool):
    stops = [" red", " blue", " green", " gold", " pink", " gray", " teal", " lime", " plum"]
    for seed in range(20):
        reply = await strop.client.chat.completions.create(
            model="agent", messages=ASK, seed=seed, stop=stops, stream=stream
        )
        name = [chunk async for chunk in reply][-1].id if stream else reply.id
        reason = stored(strop, name).response["choices"][0]["stop_reason"]
        if reason is not None:
            break
    assert reason in stops
