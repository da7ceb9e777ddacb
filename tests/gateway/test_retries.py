"""A client that comes back for an answer which never reached it gets that answer, whichever process
it comes to; one that asks again on purpose gets a fresh sample."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.exc import OperationalError

from gateway.backends.providers import Provider
from gateway.errors import ApiError
from gateway.settings import Settings
from gateway.store import undelivered
from gateway.store.models import Completion
from tests.gateway.conftest import Running, serving

ASK = [{"role": "user", "content": "Find the invoice."}]
CHAT: dict[str, Any] = {"model": "agent", "messages": ASK, "max_tokens": 6}
SURFACES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "text": ("/v1/completions", {"model": "agent", "prompt": "Find the", "max_tokens": 6, "n": 2}),
    "texts": ("/v1/completions", {"model": "agent", "prompt": ["Find", "And"], "max_tokens": 6}),
    "responses": ("/v1/responses", {"model": "agent", "input": "Find", "max_output_tokens": 6}),
    "messages": ("/v1/messages", CHAT),
    "provider": ("/v1/chat/completions", {**CHAT, "model": "big"}),
}
COUNT = {"x-stainless-retry-count": "1"}
KEY = {"Idempotency-Key": "k"}


@pytest.fixture
async def other(strop: Running, toy_base: Path) -> AsyncIterator[str]:
    """The address of a second gateway over the same database and vLLM."""
    settings = Settings(
        data_dir=strop.gateway.settings.data_dir,
        replicas=[strop.vllm.url],
        base_model=str(toy_base),
        publish_poll=0.05,
    )
    async with serving(settings) as (url, gateway):
        await gateway.publisher.reconcile()
        big = Provider(
            model="openai/base", api_base=strop.vllm.url + "/v1", options={"api_key": "sk-x"}
        )
        for each in (gateway, strop.gateway):
            each.settings.providers["big"] = big
        yield url


def parts_of(body: dict[str, Any]) -> int:
    """How many completions a request is logged as."""
    return len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1


async def hang_up(strop: Running, path: str, body: dict[str, Any], **headers: str) -> str:
    """Ask, and be gone when the answer is in the log; the id of the completion, of several the
    last one's."""
    stored: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    writer, kept = strop.gateway.writer, asyncio.Event()
    original, original_run = writer.store, writer.run
    missing, unkept = parts_of(body), parts_of(body)

    async def slow_store(captured: Any) -> Any:
        nonlocal missing
        tails = await original(captured)
        missing -= 1
        if not missing:
            stored.set_result(captured.id)
            await asyncio.sleep(60)
        return tails

    async def run(operation: Any) -> Any:
        nonlocal unkept
        try:
            return await original_run(operation)
        finally:
            unkept -= 1
            if not unkept:
                kept.set()

    writer.store, writer.run = slow_store, run
    try:
        request = asyncio.ensure_future(
            strop.http.post(strop.url + path, json=body, headers=headers)
        )
        completion_id = await asyncio.wait_for(stored, 60)
        if body.get("stream"):
            # A text stream has nothing to show before its end is in the log.
            await asyncio.wait([request], timeout=0.2)
            if request.done():
                request.result().close()
        request.cancel()
        await asyncio.wait_for(kept.wait(), 30)
    finally:
        writer.store, writer.run = original, original_run
    return completion_id


async def answered(strop: Running, url: str, body: dict[str, Any], **headers: str) -> str:
    """The whole text of an answer."""
    async with strop.http.post(url, json=body, headers=headers) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


def count(strop: Running) -> int:
    with strop.gateway.database.read() as connection:
        return connection.execute(select(func.count()).select_from(Completion)).scalar_one()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("surface", SURFACES)
async def test_the_answer_that_never_arrived_is_given_by_any_gateway(
    strop: Running, other: str, surface: str, stream: bool
):
    path, body = SURFACES[surface]
    body = {**body, "stream": stream}
    for url, mark, first in ((strop.url, COUNT, {}), (other, COUNT, {}), (other, KEY, KEY)):
        lost = (await hang_up(strop, path, body, **first)).rpartition("-")[2]
        before = count(strop)
        # Repeated on purpose, or with another body: a fresh sample.
        assert lost not in await answered(strop, url + path, body)
        changed = {**body, "temperature": 0.5}
        assert lost not in await answered(strop, url + path, changed, **mark)
        fresh = await answered(strop, url + path, body)
        again = await answered(strop, url + path, body, **mark)
        assert lost in again
        assert count(strop) == before + 3 * parts_of(body)
        assert shape(again, stream) == shape(fresh, stream)
        # It has arrived now.
        assert lost not in await answered(strop, strop.url + path, body, **mark)
        assert lost not in await answered(strop, other + path, body, **mark)


def shape(text: str, stream: bool) -> Any:
    """What kinds of things an answer is made of: of a stream, which events, each once. Whether it
    ended by itself is chance."""
    text = text.replace("response.incomplete", "response.completed")
    if not stream:
        return sorted(json.loads(text))
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    kinds = {(event.get("type"), event.get("object")) for event in events}
    return kinds, "[DONE]" in lines


@pytest.mark.parametrize("surface", ["chat", "text", "texts", "provider"])
async def test_it_comes_with_the_headers_of_the_first_answer(
    strop: Running, other: str, surface: str
):
    path, body = SURFACES[surface]
    trajectory = f"of-{surface}"
    named = {"X-Strop-Trajectory": trajectory}
    await hang_up(strop, path, body, **named)
    found = {}
    for mark in (COUNT, {}):
        async with strop.http.post(other + path, json=body, headers={**mark, **named}) as response:
            answer, headers = await response.json(), response.headers
        assert headers["x-strop-completion"] == answer["id"]
        assert headers["x-strop-trajectory"] == trajectory
        assert headers.get("x-strop-replayed") == ("true" if mark else None)
        found[bool(mark)] = {name for name in headers if name.lower().startswith("x-strop")}
    assert found[True] - found[False] == {"x-strop-replayed"}
    assert ("x-strop-version" in found[True]) == (surface != "provider")


async def test_of_several_prompts_those_that_failed_are_asked_again_alone(
    strop: Running, monkeypatch: pytest.MonkeyPatch
):
    path, body = SURFACES["texts"]
    original = strop.gateway.writer.store

    async def fail(captured: Any) -> Any:
        if captured.request["prompt"] == "And":
            # The other one is in the log by then.
            await asyncio.sleep(0.3)
            raise RuntimeError("the disk is full")
        return await original(captured)

    strop.gateway.writer.store = fail
    try:
        async with strop.http.post(strop.url + path, json=body) as response:
            assert response.status == 500
    finally:
        strop.gateway.writer.store = original
    assert count(strop) == 1

    # A retry that is refused before anything is asked takes nothing away from the next one.
    async def find_nothing(*_: Any) -> Any:
        raise ApiError(503, "Not here yet.", retry_after=1)

    with monkeypatch.context() as patch:
        patch.setattr("gateway.api.text.find_model", find_nothing)
        async with strop.http.post(strop.url + path, json=body, headers=COUNT) as response:
            assert response.status == 503
    async with strop.http.post(strop.url + path, json=body, headers=COUNT) as response:
        answer = await response.json()
        assert response.headers["x-strop-replayed"] == "true"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert count(strop) == 2


@pytest.mark.parametrize("surface", ["chat", "text"])
async def test_a_retry_that_is_lost_too_is_answered_by_the_next(
    strop: Running, monkeypatch: pytest.MonkeyPatch, surface: str
):
    path, body = SURFACES[surface]
    lost = await hang_up(strop, path, body)
    asked, kept = asyncio.Event(), asyncio.Event()
    keep = strop.gateway.retries.keep

    async def send_whole(*_: Any) -> None:
        asked.set()
        await asyncio.sleep(60)

    async def noted(*arguments: Any) -> None:
        await keep(*arguments)
        kept.set()

    with monkeypatch.context() as patch:
        patch.setattr(f"gateway.api.{surface}.send_whole", send_whole)
        patch.setattr(strop.gateway.retries, "keep", noted)
        url = strop.url + path
        request = asyncio.ensure_future(strop.http.post(url, json=body, headers=COUNT))
        await asyncio.wait_for(asked.wait(), 30)
        request.cancel()
        await asyncio.wait_for(kept.wait(), 30)
    assert lost in await answered(strop, strop.url + path, body, **COUNT)
    assert count(strop) == 1


async def test_of_many_retries_at_once_one_gets_the_answer(strop: Running, other: str):
    path, body = SURFACES["chat"]
    lost = await hang_up(strop, path, body)
    urls = [strop.url + path, other + path] * 4
    texts = await asyncio.gather(*(answered(strop, url, body, **COUNT) for url in urls))
    assert sum(lost in text for text in texts) == 1


async def test_an_answer_that_was_deleted_meanwhile_is_sampled_anew(strop: Running):
    path, body = SURFACES["chat"]
    lost = await hang_up(strop, path, body)
    async with strop.http.delete(f"{strop.url}{path}/{lost}") as response:
        assert response.status == 200
    assert lost not in await answered(strop, strop.url + path, body, **COUNT)


async def test_an_answer_is_not_kept_for_ever(strop: Running, monkeypatch: pytest.MonkeyPatch):
    path, body = SURFACES["chat"]
    lost = await hang_up(strop, path, body)
    monkeypatch.setattr(undelivered, "KEPT_SECONDS", -1.0)
    assert lost not in await answered(strop, strop.url + path, body, **COUNT)


async def test_what_cannot_be_noted_is_remembered_by_the_process(strop: Running):
    path, body = SURFACES["chat"]
    database, writer = strop.gateway.database, strop.gateway.writer
    original = undelivered.keep

    def away(*_: Any) -> None:
        raise OperationalError("", {}, Exception("the database is away"))

    undelivered.keep = away
    try:
        lost = await hang_up(strop, path, body)
    finally:
        undelivered.keep = original
    with database.read() as connection:
        assert connection.execute(select(undelivered.Undelivered.__table__)).all() == []
    assert lost in await answered(strop, strop.url + path, body, **COUNT)
    assert lost not in await answered(strop, strop.url + path, body, **COUNT)
    await writer.run(lambda c: c.execute(delete(Completion).where(Completion.id == lost)).rowcount)


async def test_retries_of_what_was_never_answered_are_ordinary_requests(strop: Running):
    path, body = SURFACES["chat"]
    first = await answered(strop, strop.url + path, body, **COUNT)
    second = await answered(strop, strop.url + path, body, **COUNT)
    assert first != second
    assert count(strop) == 2
