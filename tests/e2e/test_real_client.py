"""OpenAI's client through the gateway, on the real vLLM: JSON, streams, `n`, tools, formats."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from tokenizers import Tokenizer

from gateway.settings import PolicyConfig, Settings
from gateway.store.records import StoredCompletion
from tests.conftest import RealVllm
from tests.e2e.test_loop import Loop
from tests.gateway.conftest import serving

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

POLICY = "e2e-client"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint it.",
        # Without it vLLM holds the arguments to JSON, not to their schema.
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


class Colour(BaseModel):
    """What an answer is parsed into."""

    colour: str


@pytest.fixture
async def loop(real_vllm: RealVllm, tmp_path: Path) -> AsyncIterator[Loop]:
    settings = Settings(
        data_dir=tmp_path / "strop",
        replicas=[real_vllm.url],
        base_model=str(real_vllm.base_model),
        publish_poll=0.2,
        policies={POLICY: PolicyConfig()},
    )
    async with (
        serving(settings) as (url, gateway),
        aiohttp.ClientSession() as http,
        AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=300, max_retries=0) as client,
    ):
        await gateway.publisher.reconcile()
        yield Loop(gateway, client, http, url)


def exact(loop: Loop, completion_id: str, usage: Any, reason: str | None) -> StoredCompletion:
    """The stored completion, whose ids, logprobs and usage agree in number."""
    row = loop.completion(completion_id)
    assert row.reason == reason
    assert len(row.prompt_ids) == usage.prompt_tokens
    for choice in row.choices:
        assert len(choice.token_ids) == len(choice.logprobs) > 0
    assert sum(len(choice.token_ids) for choice in row.choices) == usage.completion_tokens
    return row


async def test_answers_at_once_streamed_and_several(loop: Loop):
    """One turn after the other, each a continuation of the one before."""
    messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
    options: Any = {"model": POLICY, "max_tokens": 6}
    reply = await loop.client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, **options
    )
    first = exact(loop, reply.id, reply.usage, None)
    shown = reply.choices[0].logprobs.content
    assert [t.logprob for t in shown] == pytest.approx(first.choices[0].logprobs, abs=1e-5)
    assert all(len(t.top_logprobs) == 2 for t in shown)
    assert reply.usage.prompt_tokens_details is not None, "cached tokens are told"

    messages += [reply.choices[0].message, {"role": "user", "content": "Another."}]
    text, usage = "", None
    async for chunk in await loop.client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **options
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    second = exact(loop, chunk.id, usage, None)
    assert (second.parent_id, second.trajectory_id) == (first.id, first.trajectory_id)
    assert text == second.response["choices"][0]["message"]["content"]

    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Two more."}]
    several = await loop.client.chat.completions.create(messages=messages, n=2, **options)
    third = exact(loop, several.id, several.usage, None)
    assert (third.parent_id, len(third.choices)) == (second.id, 2)
    # vLLM reads the history anew from its text, so what was sampled as "\n", "\n" may come back
    # as "\n\n": the text goes on, the tokens need not, and a trainer begins a new sequence there.
    tokenizer = Tokenizer.from_file(f"{loop.gateway.settings.base_model}/tokenizer.json")
    before, after = (
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (second.prompt_ids + second.choices[0].token_ids, third.prompt_ids)
    )
    assert after.startswith(before.rstrip("\ufffd")), "a character cut off is not in the text"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_tool_is_called_and_its_result_answered(loop: Loop, stream: bool):
    messages: list[Any] = [{"role": "user", "content": "Paint the fence red."}]
    options: Any = {"model": POLICY, "max_tokens": 60, "tools": [TOOL]}
    asked: Any = {"messages": messages, "tool_choice": "required", **options}
    if stream:
        async with loop.client.chat.completions.stream(
            stream_options={"include_usage": True}, **asked
        ) as events:
            async for _ in events:
                pass
            reply: Any = await events.get_final_completion()
    else:
        reply = await loop.client.chat.completions.create(**asked)
    row = exact(loop, reply.id, reply.usage, "biased_sampling")
    (call, *_) = reply.choices[0].message.tool_calls
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert row.response["choices"][0]["message"]["tool_calls"][0]["id"] == call.id
    messages += [
        reply.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "It is painted."},
    ]
    after = await loop.client.chat.completions.create(
        messages=messages, **{**options, "max_tokens": 6}
    )
    assert exact(loop, after.id, after.usage, None).parent_id == row.id


async def test_an_answer_is_parsed(loop: Loop):
    reply = await loop.client.chat.completions.parse(
        model=POLICY,
        messages=[{"role": "user", "content": "Name a colour in JSON."}],
        max_tokens=60,
        response_format=Colour,
        temperature=0.2,
    )
    exact(loop, reply.id, reply.usage, "biased_sampling")
    assert isinstance(reply.choices[0].message.parsed, Colour)
