"""Models of other providers, through LiteLLM; the fake vLLM plays the provider."""

import asyncio
import gc
import json
import sys

import pytest
from openai import APIStatusError

from gateway import preload
from gateway.backends.providers import Provider
from gateway.capture import translate, translate_messages, translate_responses
from gateway.errors import ApiError
from gateway.store import queries
from tests.gateway.conftest import MakeStrop, Running

ASK = [{"role": "user", "content": "Say something."}]

# LiteLLM takes seconds to import.
pytestmark = pytest.mark.timeout(120)


def provider(strop: Running, **options) -> None:
    # The fake vLLM's address is known only once it runs.
    strop.gateway.settings.providers["big"] = Provider(
        model="openai/base", api_base=strop.vllm.url + "/v1", **options
    )


def stored(strop: Running, completion_id: str):
    with strop.gateway.database.read() as connection:
        return queries.completion(connection, "default", completion_id)


async def test_a_provider_is_answered_through_and_logged_without_tokens(
    make_strop: MakeStrop, monkeypatch
):
    monkeypatch.setenv("BIG_KEY", "sk-something")
    async with make_strop() as strop:
        provider(strop, api_key_env="BIG_KEY")
        reply = await strop.client.chat.completions.create(
            model="big", messages=ASK, max_tokens=8, metadata={"group_id": "compare"}
        )
        assert reply.model == "big"
        row = stored(strop, reply.id)
        assert (row.policy, row.version, row.reason) == ("big", None, "no_token_ids")
        assert row.completion_tokens == reply.usage.completion_tokens
        text = ""
        async for chunk in await strop.client.chat.completions.create(
            model="big", messages=ASK, max_tokens=8, stream=True
        ):
            completion_id = chunk.id
            for choice in chunk.choices:
                text += choice.delta.content or ""
        row = stored(strop, completion_id)
        assert row.response["choices"][0]["message"]["content"] == text
        models = [model.id for model in (await strop.client.models.list()).data]
        assert "big" in models
        # A conversation with a provider is a trajectory too.
        messages = [*ASK, {"role": "assistant", "content": text}, *ASK]
        reply = await strop.client.chat.completions.create(
            model="big", messages=messages, max_tokens=4
        )
        assert stored(strop, reply.id).trajectory_id == row.trajectory_id


async def test_a_providers_error_comes_in_openais_format_and_is_logged(strop: Running):
    provider(strop, api_key_env="NO_SUCH_KEY")
    with pytest.raises(APIStatusError) as caught:
        await strop.client.chat.completions.create(model="big", messages=ASK)
    assert "NO_SUCH_KEY" in caught.value.message
    provider(strop, options={"api_key": "sk-x"})
    strop.vllm.faults.status_times = 10
    strop.vllm.faults.status = 429
    for stream in (False, True):
        with pytest.raises(APIStatusError) as caught:
            await strop.client.chat.completions.create(model="big", messages=ASK, stream=stream)
        assert caught.value.status_code == 429
        assert caught.value.code == "provider_error"


async def test_the_number_of_choices_is_bounded_on_every_surface(make_strop: MakeStrop):
    async with make_strop(max_choices=3) as strop:
        provider(strop, options={"api_key": "sk-x"})
        asked = {"messages": ASK, "max_tokens": 2}
        for path, body in (
            ("/v1/chat/completions", {"model": "agent", **asked}),
            ("/v1/chat/completions", {"model": "big", **asked}),
            ("/v1/completions", {"model": "agent", "prompt": ["a", "b"], "max_tokens": 2}),
        ):
            before = strop.vllm.stats["requests"]
            for stream in (False, True):
                more = {**body, "n": 4, "stream": stream}
                status, answer = await strop.post(path, more)
                assert (status, answer["error"]["param"]) == (400, "n"), path
                assert "at most 3 choices" in answer["error"]["message"]
            assert strop.vllm.stats["requests"] == before
            assert (await strop.post(path, {**body, "n": 3}))[0] == 200


async def test_a_stream_of_a_provider_that_is_not_logged_ends_with_an_error(strop: Running):
    provider(strop, options={"api_key": "sk-x"})
    with strop.gateway.database.write() as connection:
        connection.exec_driver_sql("DROP TABLE choices")
    body = {"model": "big", "messages": ASK, "max_tokens": 8, "stream": True}
    async with strop.http.post(strop.url + "/v1/chat/completions", json=body) as response:
        events = [line for line in (await response.text()).split("\n\n") if line]
    # What came before its end was said already; its end, and [DONE], are not.
    assert response.status == 200
    assert len(events) > 1
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == "not_logged"
    said = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert all(choice["finish_reason"] is None for chunk in said for choice in chunk["choices"])
    # The same for an answer as a whole: it is an error, and nothing of it is served.
    status, answer = await strop.post("/v1/chat/completions", {**body, "stream": False})
    assert (status, answer["error"]["code"]) == (500, "not_logged")
    assert "choices" not in answer


async def test_litellm_is_imported_before_it_is_needed(make_strop: MakeStrop, monkeypatch):
    monkeypatch.delenv("STROP_PRELOAD_LITELLM")
    monkeypatch.setattr(translate, "_loaded", {})
    monkeypatch.setattr(preload, "_AFTER_SECONDS", 0.0)
    interval = sys.getswitchinterval()
    big = {"big": Provider(model="openai/base")}
    for options in ({}, {"preload_litellm": False, "providers": big}):
        translate._loaded.clear()
        async with make_strop(**options) as strop:
            while len(translate._loaded) < 2 or sys.getswitchinterval() < interval:
                await asyncio.sleep(0.01)
            ask = {"model": "agent", "input": "?", "max_output_tokens": 3}
            assert (await strop.post("/v1/responses", ask))[0] == 200
        assert {translate_responses.MODULE, translate_messages.MODULE} <= translate._loaded.keys()
    translate._loaded.clear()
    async with make_strop(preload_litellm=False) as strop:
        assert (await strop.post("/v1/chat/completions", {"model": "agent", "messages": ASK}))[
            0
        ] == 200
    assert translate._loaded == {}


@pytest.mark.parametrize("fails", [False, True])
async def test_while_litellm_is_imported_the_event_loop_has_its_turns(monkeypatch, fails):
    monkeypatch.setattr(translate, "_loaded", {})
    monkeypatch.setattr(preload, "_AFTER_SECONDS", 0.0)
    before = (sys.getswitchinterval(), gc.isenabled())
    meanwhile = []

    def importing(name: str) -> object:
        meanwhile.append((sys.getswitchinterval() < before[0], gc.isenabled()))
        if fails:
            raise ApiError(501, "It cannot be imported.")
        return object()

    monkeypatch.setattr(translate, "_import", importing)
    await preload.litellm()
    assert meanwhile == [(True, False)] * (1 if fails else 2)
    assert (sys.getswitchinterval(), gc.isenabled()) == before


async def test_without_litellm_the_gateway_starts_all_the_same(
    make_strop: MakeStrop, monkeypatch, caplog
):
    monkeypatch.setattr(translate, "_loaded", {})
    monkeypatch.setattr(preload, "_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(preload, "find_spec", lambda _: None)
    with caplog.at_level("INFO", "strop.preload"):
        async with make_strop(preload_litellm=True) as strop:
            while "not installed" not in caplog.text:
                await asyncio.sleep(0.01)
            assert (await strop.get("/readyz"))[0] == 200
    assert translate._loaded == {}
    assert [record.levelname for record in caplog.records if record.name == "strop.preload"] == [
        "INFO"
    ]
