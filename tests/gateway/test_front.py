"""The hot path goes round the framework, and nobody can tell from its answers."""

import asyncio
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI

from gateway.api.chat import ChatCompletions
from gateway.app import SURFACES, build
from gateway.errors import ApiError
from gateway.settings import Settings
from gateway.store import keys

ASK = {"model": "agent", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture
async def both(tmp_path, toy_base):
    """A client of the short way, one of the framework's, and the application."""
    settings = Settings(data_dir=tmp_path / "strop", replicas=[], base_model=str(toy_base))
    app = build(settings)

    async def long_way(scope, receive, send):
        await FastAPI.__call__(app, scope, receive, send)

    def client(way: Callable) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(way, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://strop")

    async with app.router.lifespan_context(app), client(app) as short, client(long_way) as long:
        yield short, long, app


async def same(both, method: str, path: str, **request) -> httpx.Response:
    answers = [await client.request(method, path, **request) for client in both[:2]]
    (short, long) = answers
    assert short.status_code == long.status_code
    assert short.json() == long.json()
    assert short.headers.get("retry-after") == long.headers.get("retry-after")
    assert short.headers["content-type"] == long.headers["content-type"]
    return short


async def test_errors_are_those_of_the_framework(both):
    for path in [f"{prefix}/v1/{path}" for prefix in ("", "/rollouts/g/t") for path in SURFACES]:
        unknown = {**ASK, "model": "nobody", "input": "x", "prompt": "x", "max_tokens": 4}
        assert (await same(both, "POST", path, content=b"{")).status_code == 400
        assert (await same(both, "POST", path, json={"model": 1})).status_code in (400, 422)
        assert (await same(both, "PUT", path, json=ASK)).status_code == 405
        assert (await same(both, "POST", path, json=unknown)).status_code in (400, 404)
        await same(both, "POST", path + "/x", json=ASK)


async def test_nobody_comes_in_without_a_key(both):
    gateway = both[2].state.gateway
    _, secret = await gateway.writer.run(
        lambda connection: keys.create(connection, "shop", "posts", ["reward"])
    )
    both[2].state.authenticator._keys_exist = (float("-inf"), False)
    assert (await same(both, "POST", "/v1/chat/completions", json=ASK)).status_code == 401
    assert (await same(both, "POST", "/v1/messages", json=ASK)).status_code == 401
    headers = {"authorization": f"Bearer {secret}"}
    answer = await same(both, "POST", "/v1/chat/completions", json=ASK, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")


async def test_a_fault_of_strop_is_a_500_in_openais_format(both, monkeypatch):
    async def broken(*_):
        raise LookupError("a secret")

    monkeypatch.setattr(ChatCompletions, "answer", broken)
    answer = await same(both, "POST", "/v1/chat/completions", json=ASK)
    assert answer.status_code == 500
    assert "LookupError" in answer.json()["error"]["message"]
    assert "secret" not in answer.text


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_so_is_a_fault_while_a_key_is_looked_up(path, both, monkeypatch):
    def broken(*_):
        raise LookupError("a secret")

    authenticator = both[2].state.authenticator
    monkeypatch.setattr(authenticator, "_ask_whether_keys_exist", broken)
    authenticator._keys_exist = (float("-inf"), False)
    answer = await same(both, "POST", f"/v1/{path}", json={**ASK, "max_tokens": 4})
    assert answer.status_code == 500
    assert "LookupError" in answer.json()["error"]["message"]
    assert "secret" not in answer.text


async def test_more_requests_than_are_taken_at_once_are_a_429(both, monkeypatch):
    short, _, app = both
    held, goes_on = asyncio.Event(), asyncio.Event()

    async def answer(*_):
        held.set()
        await goes_on.wait()
        raise ApiError(400, "Enough.")

    monkeypatch.setattr(ChatCompletions, "answer", answer)
    app.most = 1
    first = asyncio.create_task(short.post("/v1/chat/completions", json=ASK))
    await held.wait()
    refused = await short.post("/v1/completions", json=ASK)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "too_many_requests"
    refused = await short.post("/v1/messages", json=ASK)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    goes_on.set()
    assert (await first).status_code == 400
    assert (await short.post("/v1/chat/completions", json=ASK)).status_code == 400
