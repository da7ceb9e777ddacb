"""The fake and the real vLLM behind one interface."""

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.adapters import TINY, write_adapter
from tests.conftest import RealVllm
from tests.fake_vllm import FakeVllm

Json = dict[str, Any]
MAX_MODEL_LEN = 1024


@dataclass
class Server:
    """A vLLM under test, and what the tests need to know about it."""

    url: str
    shapes: Path | Json
    """The base model that adapters are made for."""
    http: aiohttp.ClientSession
    folder: Path
    fake: FakeVllm | None = None
    log: Path | None = None
    loaded: list[str] = field(default_factory=list)
    model: str = "base"

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and body, parsed if it is JSON."""
        async with self.http.post(self.url + path, json=body) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if reply.content_type == _JSON else text

    async def chat(self, text: str = "Name one colour.", **fields: Any) -> Json:
        """A chat completion that must succeed, with tokens and logprobs."""
        status, body = await self.post(_CHAT, self.body(text, **fields))
        assert status == 200, self.about(body)
        return dict(body)

    async def stream(self, text: str = "Name one colour.", **fields: Any) -> list[Json]:
        """The chunks of the same, streamed."""
        body = self.body(text, stream=True, **fields)
        lines = []
        async with self.http.post(self.url + _CHAT, json=body) as reply:
            assert reply.status == 200, self.about(await reply.text())
            assert reply.content_type == "text/event-stream"
            async for line in reply.content:
                if line.strip():
                    lines.append(line.decode().strip())
        assert lines.pop() == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def body(self, text: str, **fields: Any) -> Json:
        """A request that captures tokens; a field of None is left out."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 1.0,
            "seed": 7,
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
            **fields,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def prompt_logprobs(self, model: str, ids: list[int]) -> list[float]:
        """The model's logprobs of all ids but the first."""
        asked = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        status, body = await self.post("/v1/completions", asked)
        assert status == 200, self.about(body)
        assert body["model"] == model
        entries = body["choices"][0]["prompt_logprobs"]
        assert entries[0] is None
        assert len(entries) == len(ids)
        return [e[str(i)]["logprob"] for e, i in zip(entries[1:], ids[1:], strict=True)]

    async def load(self, path: Path, name: str = "") -> str:
        """Load an adapter that must load, until the end of the test."""
        name = name or f"policy@{uuid.uuid4().hex[:6]}"
        asked = {"lora_name": name, "lora_path": str(path)}
        status, body = await self.post("/v1/load_lora_adapter", asked)
        assert status == 200, self.about(body)
        self.loaded.append(name)
        return name

    def adapter(self, name: str = "adapter", rank: int = 8, **options: Any) -> Path:
        """Write an adapter for this server's base model."""
        return write_adapter(self.folder / name, self.shapes, rank, **options)

    async def in_flight(self) -> int:
        """How many requests it works on."""
        if self.fake is not None:
            return self.fake.stats["in_flight"]
        async with self.http.get(self.url + "/metrics") as reply:
            found = re.search(r"^vllm:num_requests_running{.*} (\S+)$", await reply.text(), re.M)
        assert found is not None
        return int(float(found[1]))

    async def until_in_flight(self, number: int, seconds: float = 10) -> None:
        """Wait until it works on so many requests."""
        until = time.monotonic() + seconds
        while await self.in_flight() != number:
            assert time.monotonic() < until, self.about(f"never {number} requests in flight")
            await asyncio.sleep(0.05)

    def about(self, what: object) -> str:
        return f"{what} (log: {self.log})"


_CHAT = "/v1/chat/completions"
_JSON = "application/json"


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession() as http:
        if request.param == "fake":
            fake = FakeVllm(max_model_len=MAX_MODEL_LEN, max_lora_rank=8)
            async with fake:
                yield Server(fake.url, TINY, http, tmp_path, fake=fake)
            return
        real: RealVllm = request.getfixturevalue("real_vllm")
        one = Server(real.url, real.base_model, http, tmp_path, log=real.log, model=real.model)
        yield one
        for name in one.loaded:
            await one.post("/v1/unload_lora_adapter", {"lora_name": name})
