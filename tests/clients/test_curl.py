"""curl and a shell: what is left when there is no library."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.clients.conftest import CHAT_TOOLS, QUESTIONS, TOOLS, Served

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def curl(url: str, body: Any, *options: str) -> str:
    command = ["curl", "-sS", "--fail-with-body", "--max-time", "60", url, *options]
    command += ["-H", "Content-Type: application/json", "-d", "@-"]
    done = subprocess.run(command, input=json.dumps(body), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent(strop: Served, stream: bool):
    with strop.episode() as episode:
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                body = {"model": "agent", "messages": messages, "tools": CHAT_TOOLS}
                text = curl(
                    strop.v1 + "/chat/completions", {**body, "stream": stream}, "--no-buffer"
                )
                message = joined(text) if stream else json.loads(text)["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    function = call["function"]
                    made = TOOLS[function["name"]](**json.loads(function["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": made})
    episode.is_agent(stream=stream)


def joined(text: str) -> Any:
    """The message of a stream, put together by a reader of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    message: Any = {"role": "assistant", "content": ""}
    for line in lines:
        delta = json.loads(line)["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls") or []:
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({**piece, "function": {"name": "", "arguments": ""}})
            for name, value in piece["function"].items():
                calls[piece["index"]]["function"][name] += value
    return message


def test_a_reward_for_what_the_header_names(strop: Served):
    body = {"model": "agent", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    with strop.episode() as episode:
        text = curl(strop.v1 + "/chat/completions", body, "-i")
    (trajectory,) = episode.trajectories
    assert f"x-strop-trajectory: {trajectory.id}" in text
    reward = json.loads(
        curl(strop.v1 + "/rewards", {"trajectory_id": trajectory.id, "reward": 0.5})
    )
    assert reward["reward"] == 0.5
