"""Agent frameworks of Python: LangGraph, OpenAI's Agents SDK, pydantic-ai, LiteLLM's SDK."""

import json
import os
from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import CHAT_TOOLS, QUESTIONS, TOOLS, Served, count, look_up

os.environ["LANGSMITH_TRACING"] = "false"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class Colour(BaseModel):
    """What an answer is parsed into."""

    name: str
    shade: int


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_langgraph(strop: Served, responses: bool, stream: bool):
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import MemorySaver
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(
        model="agent",
        base_url=strop.v1,
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        use_responses_api=responses,
        streaming=stream,
    )
    agent: Any = create_react_agent(
        model, [look_up, count], prompt="Look.", checkpointer=MemorySaver()
    )
    config = {"configurable": {"thread_id": "1"}}
    with strop.episode() as episode:
        for question in QUESTIONS:
            asked = {"messages": [{"role": "user", "content": question}]}
            if stream:
                for _ in agent.stream(asked, config, stream_mode="messages"):
                    pass
            else:
                agent.invoke(asked, config)
    episode.is_agent(stream=stream)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_agents_sdk(strop: Served, responses: bool, stream: bool):
    import agents
    from openai import AsyncOpenAI

    kind = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
    async with AsyncOpenAI(base_url=strop.v1, api_key="none", max_retries=0) as client:
        agent = agents.Agent(
            name="Painter",
            instructions="Look.",
            tools=[agents.function_tool(tool) for tool in TOOLS.values()],
            model=kind(model="agent", openai_client=client),
        )
        history: list[Any] = []
        with strop.episode() as episode:
            for question in QUESTIONS:
                history.append({"role": "user", "content": question})
                if stream:
                    streamed = agents.Runner.run_streamed(agent, history)
                    async for _ in streamed.stream_events():
                        pass
                    history = streamed.to_input_list()
                else:
                    done = await agents.Runner.run(agent, history)
                    history = done.to_input_list()
    episode.is_agent(stream=stream)


async def test_the_agents_sdk_by_previous_response(strop: Served):
    import agents
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=strop.v1, api_key="none", max_retries=0) as client:
        agent = agents.Agent(
            name="Painter",
            tools=[agents.function_tool(tool) for tool in TOOLS.values()],
            model=agents.OpenAIResponsesModel(model="agent", openai_client=client),
        )
        previous: str | None = None
        with strop.episode() as episode:
            for question in QUESTIONS:
                done = await agents.Runner.run(
                    agent,
                    question,
                    previous_response_id=previous,
                    auto_previous_response_id=True,
                )
                previous = done.last_response_id
    episode.is_agent()


@pytest.mark.parametrize("surface", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_pydantic_ai(strop: Served, surface: str, stream: bool):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=strop.v1, api_key="none")
    model: Any = {
        "chat": lambda: OpenAIChatModel("agent", provider=provider),
        "responses": lambda: OpenAIResponsesModel("agent", provider=provider),
        "messages": lambda: AnthropicModel(
            "agent", provider=AnthropicProvider(base_url=strop.url, api_key="none")
        ),
    }[surface]()
    agent = Agent(model, tools=[look_up, count], instructions="Look.")
    history: Any = None
    with strop.episode() as episode:
        for question in QUESTIONS:
            if stream:
                async with agent.run_stream(question, message_history=history) as streamed:
                    assert await streamed.get_output()
                    history = streamed.all_messages()
            else:
                done = await agent.run(question, message_history=history)
                history = done.all_messages()
    episode.is_agent(stream=stream)


async def test_pydantic_ai_with_an_output_tool(strop: Served):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=strop.v1, api_key="none")
    agent = Agent(OpenAIChatModel("agent", provider=provider), tools=[look_up], output_type=Colour)
    with strop.episode() as episode:
        done = await agent.run(QUESTIONS[0])
    assert done.output == Colour(name="red", shade=7)
    reason = "biased_sampling" if "tool_choice" in episode.completions[0].request else None
    episode.is_agent(turns=2, reason=reason)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(strop: Served, stream: bool):
    import litellm

    with strop.episode() as episode:
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                reply: Any = litellm.completion(
                    model="openai/agent",
                    api_base=strop.v1,
                    api_key="none",
                    messages=messages,
                    tools=CHAT_TOOLS,
                    stream=stream,
                    max_retries=0,
                )
                if stream:
                    reply = litellm.stream_chunk_builder(list(reply), messages=messages)
                message = reply.choices[0].message
                messages.append(message.model_dump())
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    made = TOOLS[call.function.name](**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": made})
    episode.is_agent(stream=stream)
