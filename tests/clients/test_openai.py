"""OpenAI's own Python client: chat completions and responses, at once and streamed."""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from tests.clients.conftest import CHAT_TOOLS, PARAMETERS, QUESTIONS, TOOLS, Served


class Colour(BaseModel):
    """What an answer is parsed into."""

    name: str
    shade: int
    tags: list[str]


@pytest.fixture
def client(strop: Served):
    with OpenAI(base_url=strop.v1, api_key="none", max_retries=0) as found:
        yield found


def results(message: ChatCompletionMessage) -> list[Any]:
    """What the tools say to the calls of an answer."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": TOOLS[call.function.name](**json.loads(call.function.arguments)),
        }
        for call in message.tool_calls or []
    ]


def test_an_agent(strop: Served, client: OpenAI):
    with strop.episode() as episode:
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                reply = client.chat.completions.create(
                    model="agent", messages=messages, tools=CHAT_TOOLS
                )
                message = reply.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    break
                messages += results(message)
    episode.is_agent(stream=False)
    roles = [message["role"] for message in episode.completions[-1].messages]
    assert roles == [*["user", *["assistant", "tool"] * 2, "assistant"] * 2][:-1]


def test_an_agent_that_streams_by_hand(strop: Served, client: OpenAI):
    """Deltas are put together the way OpenAI's cookbook does it, and echoed as dictionaries."""
    with strop.episode() as episode:
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                text, calls = "", {}
                for chunk in client.chat.completions.create(
                    model="agent", messages=messages, tools=CHAT_TOOLS, stream=True
                ):
                    delta = chunk.choices[0].delta
                    text += delta.content or ""
                    for piece in delta.tool_calls or []:
                        if piece.id:
                            calls[piece.index] = piece.model_dump()
                        else:
                            calls[piece.index]["function"]["arguments"] += piece.function.arguments
                messages.append({"role": "assistant", "content": text or None})
                if not calls:
                    break
                messages[-1]["tool_calls"] = list(calls.values())
                messages += results(ChatCompletionMessage.model_validate(messages[-1]))
    episode.is_agent(stream=True)


def test_an_agent_that_calls_tools_together(strop: Served, client: OpenAI):
    with strop.episode() as episode:
        messages: list[Any] = [{"role": "user", "content": "Do both together."}]
        for _ in range(2):
            with client.chat.completions.stream(
                model="agent",
                messages=messages,
                tools=CHAT_TOOLS,
                stream_options={"include_usage": True},
            ) as stream:
                for _ in stream:
                    pass
                final = stream.get_final_completion()
            assert final.usage is not None
            message = final.choices[0].message
            messages += [message, *results(message)]
    episode.is_agent(turns=2)
    first = episode.completions[0]
    assert [c["function"]["name"] for c in answer(first)["tool_calls"]] == list(TOOLS)


async def test_an_asynchronous_agent_that_parses_its_answer(strop: Served):
    tools: list[Any] = [
        {**tool, "function": {**tool["function"], "strict": True}} for tool in CHAT_TOOLS
    ]
    with strop.episode() as episode:
        async with AsyncOpenAI(base_url=strop.v1, api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
            for _ in range(3):
                reply = await client.chat.completions.parse(
                    model="agent", messages=messages, tools=tools, response_format=Colour
                )
                message = reply.choices[0].message
                # As the library gives it: with `parsed` and `parsed_arguments` in it.
                messages += [message, *results(message)]
    assert message.parsed == Colour(name="red", shade=7, tags=["red"])
    # An answer that had to have a form is not the model's own.
    episode.is_agent(turns=3, reason="biased_sampling")


RESPONSES_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": tool.__doc__, "parameters": PARAMETERS[name]}
    for name, tool in TOOLS.items()
]


def outputs(response: Any) -> list[Any]:
    """What the tools say to the calls of a response."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": TOOLS[item.name](**json.loads(item.arguments)),
        }
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_an_agent_on_responses(strop: Served, client: OpenAI, chained: bool, stream: bool):
    """The history is sent again each time, or named by `previous_response_id`."""

    def ask(**options: Any) -> Any:
        options = {"model": "agent", "tools": RESPONSES_TOOLS, "instructions": "Look.", **options}
        if not stream:
            return client.responses.create(**options)
        with client.responses.stream(**options) as events:
            for _ in events:
                pass
            return events.get_final_response()

    with strop.episode() as episode:
        history: list[Any] = []
        previous = None
        for question in QUESTIONS:
            new: list[Any] = [{"role": "user", "content": question}]
            while new:
                history += new
                if chained:
                    response = ask(input=new, previous_response_id=previous)
                else:
                    response = ask(input=history)
                previous = response.id
                history += response.output
                new = outputs(response)
    episode.is_agent(stream=stream)


def test_a_response_is_parsed(strop: Served, client: OpenAI):
    with strop.episode() as episode:
        first = client.responses.parse(model="agent", input="A colour.", text_format=Colour)
        client.responses.parse(
            model="agent",
            input=[
                {"role": "user", "content": "A colour."},
                *first.output,
                {"role": "user", "content": "More."},
            ],
            text_format=Colour,
        )
    assert first.output_parsed == Colour(name="red", shade=7, tags=["red"])
    episode.is_agent(turns=2, reason="biased_sampling")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_not_echoed_starts_no_new_trajectory(
    strop: Served, client: OpenAI, stream: bool
):
    strop.vllm.thoughts = "red or blue"
    with strop.episode() as episode:
        messages: list[Any] = [{"role": "user", "content": "Think."}]
        for _ in range(2):
            text = thought = ""
            if stream:
                for chunk in client.chat.completions.create(
                    model="agent", messages=messages, stream=True
                ):
                    text += chunk.choices[0].delta.content or ""
                    thought += getattr(chunk.choices[0].delta, "reasoning", None) or ""
            else:
                reply = client.chat.completions.create(model="agent", messages=messages)
                text = reply.choices[0].message.content or ""
                thought = reply.choices[0].message.reasoning  # type: ignore[attr-defined]
            assert thought == "red or blue"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
    assert len(episode.trajectories) == 1
    first, second = episode.completions
    assert second.parent_id == first.id
    assert answer(first)["reasoning"] == "red or blue"


def answer(completion: Any) -> Any:
    """The message that a completion answered with."""
    return completion.response["choices"][0]["message"]
