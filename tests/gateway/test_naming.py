"""Model names that exist, and that this process has yet to see."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import insert, update
from sqlalchemy.exc import OperationalError

from gateway.backends.launch import free_port
from gateway.catalog import Catalog, split_version
from gateway.store.models import Policy, Version
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.test_crash import ready

SAY = [{"role": "user", "content": "Hi."}]
SURFACES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": SAY},
    "completions": {"prompt": "Hi."},
    "responses": {"input": "Hi."},
    "messages": {"messages": SAY, "max_tokens": 3},
    "embeddings": {"input": "Hi."},
}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("agent", ("agent", None)),
        ("agent@3", ("agent", 3)),
        ("a@b@12", ("a@b", 12)),
        ("agent@", ("agent@", None)),
        ("agent@x", ("agent@x", None)),
        ("@3", ("@3", None)),
        ("agent@1234567890", ("agent@1234567890", None)),
    ],
)
def test_a_name_and_its_version(name: str, parts: tuple[str, int | None]):
    assert split_version(name) == parts


def unseen(strop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first look, which does not come."""

    async def nothing() -> None:
        pass

    monkeypatch.setattr(strop.gateway.publisher, "reconcile", nothing)
    strop.gateway.publisher.catalog = Catalog()


@pytest.mark.parametrize("path", SURFACES)
async def test_what_another_process_has_made_is_not_unknown(
    path: str, strop: Running, monkeypatch: pytest.MonkeyPatch
):
    unseen(strop, monkeypatch)
    for model in ("agent", "agent@0"):
        status, answer = await strop.post("/v1/" + path, {"model": model, **SURFACES[path]})
        assert status == 503
        assert "Try again in a second" in answer["error"]["message"]
    for model in ("nobody", "agent@7", "nobody@0"):
        status, _ = await strop.post("/v1/" + path, {"model": model, **SURFACES[path]})
        assert status == 404


async def test_the_client_is_told_when_to_come_again_and_then_is_served(strop: Running):
    strop.gateway.publisher.catalog = Catalog()
    body = {"model": "agent", "messages": SAY}
    async with strop.http.post(strop.url + "/v1/chat/completions", json=body) as response:
        if response.status == 200:  # The publisher was quicker.
            return
        assert response.headers["retry-after"] == "1"
        assert (await response.json())["error"]["code"] == "model_not_ready"
    async with asyncio.timeout(10):
        while (await strop.post("/v1/chat/completions", body))[0] != 200:
            await asyncio.sleep(0.02)


async def test_versions_exist_while_they_are_served(
    strop: Running, monkeypatch: pytest.MonkeyPatch
):
    row = {"project": "default", "policy": "agent", "adapter_path": None, "created_at": 0.0}
    with strop.gateway.database.write() as connection:
        states = {1: "serving", 2: "retired", 3: "failed", 4: "ready"}
        for number, state in states.items():
            connection.execute(insert(Version).values(number=number, state=state, **row))
    unseen(strop, monkeypatch)

    async def status(number: int) -> int:
        return (await strop.get(f"/v1/models/agent@{number}"))[0]

    assert [await status(n) for n in range(1, 5)] == [503, 404, 404, 404]
    with strop.gateway.database.write() as connection:
        connection.execute(update(Policy).values(canary=4))
    assert await status(4) == 503


async def test_without_the_database_an_unknown_name_stays_unknown(
    strop: Running, monkeypatch: pytest.MonkeyPatch
):
    def away() -> None:
        raise OperationalError("SELECT", None, Exception("away"))

    body = {"model": "nobody", "messages": SAY}
    # Whether there are keys is known from here on.
    assert (await strop.post("/v1/chat/completions", body))[0] == 404
    monkeypatch.setattr(strop.gateway.database, "read", away)
    assert (await strop.post("/v1/chat/completions", body))[0] == 404


async def test_whoever_listens_has_looked(toy_base: Path, tmp_path: Path, make_strop: MakeStrop):
    async with make_strop() as strop:
        assert strop.gateway.publisher.looked.is_set()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with FakeVllm() as vllm, aiohttp.ClientSession() as http:
        env = {
            **os.environ,
            "STROP_DATA_DIR": str(tmp_path / "two"),
            "STROP_REPLICAS": f'["{vllm.url}"]',
            "STROP_BASE_MODEL": str(toy_base),
            "STROP_PORT": str(port),
            # Nobody looks a second time while this lasts.
            "STROP_PUBLISH_POLL": "600",
        }
        command = [sys.executable, "-m", "gateway.cli", "serve", "--workers", "3"]
        process = subprocess.Popen(command, env=env)
        try:
            await ready(http, url)

            async def ask() -> int:
                async with (
                    aiohttp.ClientSession() as own,
                    own.post(
                        url + "/v1/chat/completions", json={"model": "agent", "messages": SAY}
                    ) as response,
                ):
                    return response.status

            for _ in range(5):
                assert set(await asyncio.gather(*(ask() for _ in range(8)))) == {200}
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)
