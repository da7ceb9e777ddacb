"""Models of other providers, through LiteLLM; the fake vLLM plays the provider."""

import pytest
from openai import APIStatusError

from gateway.backends.providers import Provider
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
