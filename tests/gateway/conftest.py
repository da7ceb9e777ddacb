"""A gateway on a real socket in front of a fake vLLM, and OpenAI's own client before it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from openai import AsyncOpenAI

from gateway.app import build
from gateway.gateway import Gateway
from gateway.protocol import Protocol
from gateway.settings import Settings
from tests.fake_vllm import FakeVllm


@dataclass
class Running:
    """What a test needs of a running gateway."""

    url: str
    gateway: Gateway
    vllm: FakeVllm
    client: AsyncOpenAI
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[str, Gateway]]:
    """The application under uvicorn on a free port."""
    app = build(settings)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", http=Protocol))
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.gateway
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def running(tmp_path: Path, base: Path, **options: Any) -> AsyncIterator[Running]:
    """A gateway, ready, in front of a fake vLLM."""
    async with AsyncExitStack() as stack:
        vllm = await stack.enter_async_context(FakeVllm())
        settings = Settings(
            data_dir=tmp_path / "strop",
            replicas=[vllm.url],
            base_model=str(base),
            publish_poll=0.05,
            **options,
        )
        url, gateway = await stack.enter_async_context(serving(settings))
        await gateway.publisher.reconcile()
        http = await stack.enter_async_context(aiohttp.ClientSession())
        client = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        stack.push_async_callback(client.close)
        yield Running(url, gateway, vllm, client, http)


def write_toy_base(parent: Path) -> Path:
    """A base model folder that is just large enough to have layers."""
    import json

    import numpy as np
    from safetensors.numpy import save_file

    folder = parent / "base"
    folder.mkdir()
    layers = {
        f"model.layers.0.{part}.weight": np.zeros((8, 8), np.float32)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
    }
    save_file(layers, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.fixture
def toy_base(tmp_path: Path) -> Path:
    """The folder of a small base model."""
    return write_toy_base(tmp_path)


@pytest.fixture
async def strop(tmp_path: Path, toy_base: Path) -> AsyncIterator[Running]:
    """A running gateway with the policy `agent`."""
    async with running(tmp_path, toy_base) as found:
        yield found


MakeStrop = Callable[..., Any]


@pytest.fixture
def make_strop(tmp_path: Path, toy_base: Path) -> MakeStrop:
    """`async with make_strop(option=…)`: a gateway with other settings."""
    return lambda **options: running(tmp_path, toy_base, **options)
