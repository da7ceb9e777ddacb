"""Responses that are asked for again, with OpenAI's own client."""

import orjson
import pytest
from openai import BadRequestError, NotFoundError

from tests.gateway.conftest import Running
from tests.gateway.test_responses import TOOL, stored


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_what_it_was(strop: Running, stream: bool):
    strop.vllm.thoughts, strop.vllm.cached_tokens = "red or blue", 3
    options = {
        "model": "agent",
        "instructions": "Paint.",
        "input": [
            {"role": "developer", "content": "Be quick."},
            {"role": "user", "content": [{"type": "input_text", "text": "Paint!"}]},
        ],
        "tools": [TOOL, {"type": "custom", "name": "shell", "description": "Run it."}],
        "metadata": {"group_id": "g"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "temperature": 0.5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    if stream:
        async with strop.client.responses.stream(**options) as events:
            async for _ in events:
                pass
            made = await events.get_final_response()
    else:
        made = await strop.client.responses.create(**options)
    assert [item.type for item in made.output] == ["reasoning", "function_call"]
    assert made.usage.input_tokens_details.cached_tokens == 3
    found = await strop.client.responses.retrieve(made.id)
    # Found once more it says when it was done, to the second.
    assert abs(found.completed_at - made.completed_at) <= 1
    before, after = made.model_dump(mode="json"), found.model_dump(mode="json")
    for shown in (before, after):
        del shown["completed_at"]
        for item in shown["output"]:
            item.pop("parsed_arguments", None)
    assert after == before


async def test_input_items_are_the_conversation_before_a_response(strop: Running):
    options = {"model": "agent", "instructions": "Paint.", "tools": [TOOL]}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    first = await strop.client.responses.create(
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Like this:"}, image]}],
        **options,
    )
    assert stored(strop, first.id).reason == "multimodal"
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = await strop.client.responses.create(
        previous_response_id=first.id, input=[output], **options
    )
    third = await strop.client.responses.create(
        previous_response_id=second.id, input="And then?", model="agent", max_output_tokens=4
    )
    items = [i async for i in strop.client.responses.input_items.list(third.id, order="asc")]
    assert [item.type for item in items] == [
        *("message", "function_call", "function_call_output", "message", "message"),
    ]
    assert [getattr(item, "role", None) for item in items] == [
        *("user", None, None, "assistant", "user"),
    ]
    assert items[0].content[1].model_dump(exclude_unset=True) == {**image, "file_id": None}
    assert (items[1].call_id, items[1].arguments) == (call.call_id, call.arguments)
    assert items[2].output == "done"
    assert items[3].content[0].text == second.output_text
    assert len({item.id for item in items}) == len(items)
    pages = strop.client.responses.input_items.list(third.id, limit=2)
    assert [i.id async for i in pages] == [i.id for i in reversed(items)]
    with pytest.raises(BadRequestError):
        await strop.client.responses.input_items.list(third.id, after="msg_x")


async def test_a_deleted_response_is_gone(strop: Running):
    made = await strop.client.responses.create(model="agent", input="Hi.", max_output_tokens=4)
    status, body = await strop.get(f"/v1/responses/{made.id}")
    assert (status, body["id"]) == (200, made.id)
    await strop.client.responses.delete(made.id)
    for call in (
        strop.client.responses.retrieve,
        strop.client.responses.delete,
        strop.client.responses.cancel,
        strop.client.responses.input_items.list,
    ):
        with pytest.raises(NotFoundError) as caught:
            await call(made.id)
        assert caught.value.code == "response_not_found"


async def test_only_a_response_in_the_background_can_be_cancelled(strop: Running):
    made = await strop.client.responses.create(model="agent", input="Hi.", max_output_tokens=4)
    with pytest.raises(BadRequestError):
        await strop.client.responses.cancel(made.id)


async def test_a_response_that_broke_off_has_failed(strop: Running):
    strop.vllm.faults.die_mid_stream = 3
    stream = await strop.client.responses.create(model="agent", input="Hi.", stream=True)
    last = [event async for event in stream][-1].response
    found = await strop.client.responses.retrieve(last.id)
    assert (found.status, last.status) == ("failed", "failed")


async def test_a_chat_completion_is_shown_as_a_response_too(strop: Running):
    reply = await strop.client.chat.completions.create(
        model="agent", messages=[{"role": "user", "content": "Hi."}], max_tokens=4
    )
    found = await strop.client.responses.retrieve(reply.id)
    assert found.output_text == reply.choices[0].message.content
    text = await strop.client.completions.create(model="agent", prompt="Hi.", max_tokens=4)
    with pytest.raises(NotFoundError):
        await strop.client.responses.retrieve(text.id)


async def test_tokens_of_an_input_are_counted_as_vllm_counts_them(strop: Running):
    options = {"model": "agent", "instructions": "Paint.", "tools": [TOOL]}
    first = await strop.client.responses.create(input="Paint!", **options)
    counted = await strop.client.responses.input_tokens.count(input="Paint!", **options)
    assert counted.input_tokens == first.usage.input_tokens
    after = {"previous_response_id": first.id, "input": "More!", **options}
    counted = await strop.client.responses.input_tokens.count(**after)
    second = await strop.client.responses.create(**after)
    assert counted.input_tokens == second.usage.input_tokens


async def test_items_may_be_named_instead_of_sent(strop: Running):
    strop.vllm.thoughts = "red or blue"
    ask = {"role": "user", "content": "Paint!"}
    first = await strop.client.responses.create(model="agent", input=[ask], tools=[TOOL])
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    output = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "done"}
    second = await strop.client.responses.create(
        model="agent", input=[ask, *named, output], tools=[TOOL]
    )
    row = stored(strop, second.id)
    assert row.parent_id == stored(strop, first.id).id
    assert orjson.loads(row.messages[1]["tool_calls"][0]["function"]["arguments"]) == {
        "colour": "red"
    }
    with pytest.raises(NotFoundError) as caught:
        await strop.client.responses.create(
            model="agent", input=[{"type": "item_reference", "id": "fc_0_0"}]
        )
    assert "fc_0_0" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_the_text_are_there_if_they_were_asked_for(strop: Running, stream: bool):
    options = {"model": "agent", "input": "Hi.", "max_output_tokens": 30}
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for more in (asked, {}):
        if stream:
            deltas = []
            async with strop.client.responses.stream(**options, **more) as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        deltas += event.logprobs
                    if event.type == "response.output_text.done":
                        done = event.logprobs
                made = await events.get_final_response()
        else:
            made = await strop.client.responses.create(**options, **more)
        (text,) = made.output[0].content
        (choice,) = stored(strop, made.id).choices
        # Stored in single precision.
        sampled = pytest.approx(choice.logprobs, abs=1e-5)
        if not more:
            assert not text.logprobs
            continue
        assert made.top_logprobs == 2
        assert [value.logprob for value in text.logprobs] == sampled
        assert all(len(value.top_logprobs) == 2 for value in text.logprobs)
        if stream:
            assert [value.logprob for value in done] == sampled
            # The token that ends the answer has no text to come with.
            with_text = pytest.approx(choice.logprobs[: len(deltas)], abs=1e-5)
            assert [value.logprob for value in deltas] == with_text
            assert len(choice.logprobs) - len(deltas) <= 1
