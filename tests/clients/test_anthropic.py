"""Anthropic's own Python client."""

from typing import Any

import pytest
from anthropic import Anthropic, beta_tool

from tests.clients.conftest import PARAMETERS, QUESTIONS, TOOLS, Served

MESSAGES_TOOLS: list[Any] = [
    {"name": name, "description": tool.__doc__, "input_schema": PARAMETERS[name]}
    for name, tool in TOOLS.items()
]


def results(message: Any) -> list[Any]:
    """What the tools say to the calls of a message."""
    return [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": TOOLS[block.name](**block.input),
        }
        for block in message.content
        if block.type == "tool_use"
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent(strop: Served, stream: bool):
    with (
        strop.episode() as episode,
        Anthropic(base_url=strop.url, api_key="none", max_retries=0) as client,
    ):
        options: Any = {
            "model": "agent",
            "max_tokens": 400,
            "tools": MESSAGES_TOOLS,
            "system": [
                {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}},
            ],
        }
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                if stream:
                    with client.messages.stream(messages=messages, **options) as events:
                        message = events.get_final_message()
                else:
                    message = client.messages.create(messages=messages, **options)
                messages.append({"role": "assistant", "content": message.content})
                if message.stop_reason != "tool_use":
                    break
                # The mark moves to the newest message in each turn, as Anthropic advises.
                found = results(message)
                found[-1]["cache_control"] = {"type": "ephemeral"}
                messages.append({"role": "user", "content": found})
    episode.is_agent(stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_thinks_and_sends_its_thoughts_back(strop: Served, stream: bool):
    strop.vllm.thoughts = "red or blue"
    with (
        strop.episode() as episode,
        Anthropic(base_url=strop.url, api_key="none", max_retries=0) as client,
    ):
        options: Any = {
            "model": "agent",
            "max_tokens": 400,
            "tools": MESSAGES_TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        messages: list[Any] = [{"role": "user", "content": "Do both together."}]
        for _ in range(2):
            if stream:
                with client.messages.stream(messages=messages, **options) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(messages=messages, **options)
            assert message.content[0].type == "thinking"
            assert message.content[0].thinking == "red or blue"
            messages.append({"role": "assistant", "content": message.content})
            if message.stop_reason == "tool_use":
                messages.append({"role": "user", "content": results(message)})
    first, second = episode.completions
    assert second.parent_id == first.id
    assert len(first.response["choices"][0]["message"]["tool_calls"]) == 2


def test_the_tool_runner(strop: Served):
    with (
        strop.episode() as episode,
        Anthropic(base_url=strop.url, api_key="none", max_retries=0) as client,
    ):
        last = client.beta.messages.tool_runner(
            model="agent",
            max_tokens=400,
            tools=[beta_tool(tool) for tool in TOOLS.values()],
            messages=[{"role": "user", "content": QUESTIONS[0]}],
        ).until_done()
    assert last.stop_reason == "end_turn"
    episode.is_agent(turns=3)
