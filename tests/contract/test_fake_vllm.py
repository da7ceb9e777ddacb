"""That the fake misbehaves as it is told to; what it does otherwise is held by the contract."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.adapters import TINY, write_adapter
from tests.fake_vllm import FakeVllm, toy_logprobs

BODY = {
    "model": "base",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 6,
    "logprobs": True,
    "return_token_ids": True,
    "ignore_eos": True,
}


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with FakeVllm() as fake:
        yield fake


async def ask(vllm: FakeVllm, **fields: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(vllm.url + "/v1/chat/completions", json={**BODY, **fields}) as reply,
    ):
        return reply.status, json.loads(await reply.text())


async def lines(vllm: FakeVllm) -> list[str]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(vllm.url + "/v1/chat/completions", json={**BODY, "stream": True}) as reply,
    ):
        return [line.decode().strip() async for line in reply.content if line.strip()]


async def test_replies_can_be_wrong(vllm: FakeVllm) -> None:
    vllm.faults.mismatch = vllm.faults.wrong_usage = True
    vllm.faults.wrong_model_name = "policy@7"
    _, body = await ask(vllm)
    choice = body["choices"][0]
    assert len(choice["token_ids"]) == 5
    assert len(choice["logprobs"]["content"]) == 6
    assert body["usage"]["completion_tokens"] == 7
    assert body["model"] == "policy@7"
    vllm.faults.drop_token_ids = True
    _, body = await ask(vllm)
    assert body["prompt_token_ids"] is None
    assert body["choices"][0]["token_ids"] is None


async def test_requests_can_be_refused_a_number_of_times(vllm: FakeVllm) -> None:
    vllm.faults.status, vllm.faults.status_times = 429, 2
    assert [(await ask(vllm))[0] for _ in range(3)] == [429, 429, 200]


async def test_streams_can_break(vllm: FakeVllm) -> None:
    assert len(await lines(vllm)) == 8
    vllm.faults.tokens_per_chunk = 4
    assert len(await lines(vllm)) == 4
    vllm.faults.tokens_per_chunk = 1
    vllm.faults.error_mid_stream = 2
    assert '"error"' in (await lines(vllm))[2]
    vllm.faults.error_mid_stream = None
    vllm.faults.die_mid_stream = 2
    with pytest.raises(aiohttp.ClientPayloadError):
        await lines(vllm)
    vllm.faults.die_mid_stream = None
    vllm.faults.broken_json = True
    with pytest.raises(json.JSONDecodeError):
        json.loads((await lines(vllm))[0].removeprefix("data: "))


async def test_probe_is_predicted_from_the_adapter_alone(vllm: FakeVllm, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", TINY, seed=1)
    ids = [256, 104, 105, 257, 260, 270]
    vllm.adapters["p@1"] = str(path)
    asked = {"model": "p@1", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}

    async def probe() -> list[float]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(vllm.url + "/v1/completions", json=asked) as reply,
        ):
            entries = (await reply.json())["choices"][0]["prompt_logprobs"]
        return [e[str(i)]["logprob"] for e, i in zip(entries[1:], ids[1:], strict=True)]

    assert await probe() == toy_logprobs(path, ids) != toy_logprobs(None, ids)
    vllm.faults.ignore_adapters = True
    assert await probe() == toy_logprobs(None, ids)


async def test_tool_is_called_and_its_text_is_in_the_tokens(vllm: FakeVllm) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["q"]}}}]
    _, body = await ask(vllm, tools=tools, max_tokens=None)
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": '{"q": "red"}'}
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
    messages = [BODY["messages"][0], choice["message"], answer]  # type: ignore[index]
    _, after = await ask(vllm, tools=tools, messages=messages)
    before = body["prompt_token_ids"] + choice["token_ids"]
    assert after["prompt_token_ids"][: len(before)] == before
    assert after["choices"][0]["message"]["content"]


SCRIPT = Path(__file__).resolve().parents[1] / "fake_vllm.py"


async def test_runs_as_a_script_and_is_told_over_http() -> None:
    command = [sys.executable, str(SCRIPT), "--model", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        async with aiohttp.ClientSession() as http:
            async with http.post(url + "/_faults", json={"status_times": 1}) as reply:
                assert (await reply.json())["status_times"] == 1
            async with http.post(url + "/_faults", json={"no_such": 1}) as reply:
                assert reply.status == 400
            body = {**BODY, "model": "tiny"}
            for expected in (500, 200):
                async with http.post(url + "/v1/chat/completions", json=body) as reply:
                    assert reply.status == expected
            async with http.get(url + "/_stats") as reply:
                stats = await reply.json()
        assert (stats["requests"], stats["completed"], stats["in_flight"]) == (2, 1, 0)
    finally:
        process.terminate()
        process.wait(10)


async def test_without_a_parser_no_tool_is_called() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with FakeVllm(tool_parser=False) as vllm:
        for choice, said in (("auto", '"auto" tool choice'), ("required", "requires --tool-call-")):
            status, body = await ask(vllm, tools=tools, tool_choice=choice)
            assert status == 400
            assert said in body["error"]["message"]
