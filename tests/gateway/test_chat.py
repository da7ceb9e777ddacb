"""`POST /v1/chat/completions`, as OpenAI's own client uses it."""

import asyncio

import pytest
from openai import APIError, APIStatusError, BadRequestError, NotFoundError, OpenAI

from gateway.settings import PolicyConfig
from gateway.store import queries
from tests.gateway.conftest import MakeStrop, Running
from tests.toy_vllm.model import chat_prompt, encode

ASK = [{"role": "user", "content": "Say something."}]


def stored(strop: Running, completion_id: str):
    with strop.gateway.database.read() as connection:
        found = queries.completion(connection, "default", completion_id)
    assert found is not None
    return found


async def test_a_reply_is_logged_with_the_exact_tokens_before_it_arrives(strop: Running):
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=12)
    row = stored(strop, reply.id)
    assert row.prompt_ids is not None
    assert len(row.prompt_ids) == reply.usage.prompt_tokens
    (choice,) = row.choices
    assert len(choice.token_ids) == len(choice.logprobs) == reply.usage.completion_tokens
    assert (row.version, row.served_model, row.status, row.reason) == (
        0,
        "agent@0",
        "complete",
        None,
    )
    assert reply.model == "agent@0"
    assert row.messages == ASK


async def test_a_client_sees_nothing_that_it_did_not_ask_for(strop: Running):
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=5)
    assert reply.choices[0].logprobs is None
    assert "token_ids" not in reply.choices[0].model_extra
    assert "prompt_token_ids" not in reply.model_extra
    async for chunk in await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=5, stream=True
    ):
        assert chunk.usage is None
        assert "prompt_token_ids" not in (chunk.model_extra or {})
        for choice in chunk.choices:
            assert choice.logprobs is None
            assert "token_ids" not in (choice.model_extra or {})


async def test_a_client_gets_the_logprobs_and_ids_that_it_asked_for(strop: Running):
    options = {
        "model": "agent",
        "messages": ASK,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    reply = await strop.client.chat.completions.create(**options)
    row = stored(strop, reply.id)
    content = reply.choices[0].logprobs.content
    assert [item.logprob for item in content] == pytest.approx(row.choices[0].logprobs, abs=1e-5)
    assert all(len(item.top_logprobs) == 2 for item in content)
    assert reply.choices[0].model_extra["token_ids"] == row.choices[0].token_ids
    assert reply.model_extra["prompt_token_ids"] == row.prompt_ids
    streamed_ids, streamed_logprobs = [], []
    async for chunk in await strop.client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed_ids += choice.model_extra.get("token_ids") or []
            streamed_logprobs += (
                [i.logprob for i in choice.logprobs.content] if choice.logprobs else []
            )
        completion_id = chunk.id
    row = stored(strop, completion_id)
    assert streamed_ids == row.choices[0].token_ids
    assert streamed_logprobs == pytest.approx(row.choices[0].logprobs, abs=1e-5)


async def test_a_stream_is_stored_as_the_reply_it_amounts_to(strop: Running):
    text, usage = "", None
    stream = await strop.client.chat.completions.create(
        model="agent",
        messages=ASK,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        completion_id = chunk.id
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    row = stored(strop, completion_id)
    assert row.stream
    assert row.reason is None
    assert row.response["choices"][0]["message"]["content"] == text
    assert usage.completion_tokens == len(row.choices[0].token_ids)
    status, body = await strop.get(f"/v1/chat/completions/{completion_id}")
    assert status == 200
    assert body["choices"][0]["message"]["content"] == text


async def test_several_choices_are_kept_apart(strop: Running):
    reply = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=8, n=3
    )
    row = stored(strop, reply.id)
    assert [choice.index for choice in row.choices] == [0, 1, 2]
    assert sum(len(choice.token_ids) for choice in row.choices) == reply.usage.completion_tokens
    texts: dict[int, str] = {}
    async for chunk in await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=8, n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        completion_id = chunk.id
    row = stored(strop, completion_id)
    assert {c["index"]: c["message"]["content"] or "" for c in row.response["choices"]} == texts


async def test_tokens_of_a_conversation_join_across_turns(strop: Running):
    messages = list(ASK)
    for turn in range(5):
        reply = await strop.client.chat.completions.create(
            model="agent", messages=messages, max_tokens=7
        )
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "user", "content": f"And then? {turn}"})
    row = stored(strop, reply.id)
    with strop.gateway.database.read() as connection:
        trajectory = queries.trajectory(connection, "default", row.trajectory_id)
    assert len(trajectory.completions) == 5
    for completion in trajectory.completions:
        # Ids read back over shared beginnings equal what vLLM was given for these messages.
        assert completion.prompt_ids == chat_prompt(completion.messages)
        assert len(completion.prompt_ids) == completion.prompt_tokens
    assert trajectory.attribution == "new"
    assert trajectory.group_id.startswith("task-")


async def test_the_sync_client_works_too(strop: Running):
    def ask() -> str:
        with OpenAI(base_url=strop.url + "/v1", api_key="none") as client:
            reply = client.chat.completions.create(model="agent", messages=ASK, max_tokens=4)
            assert [m.id for m in client.models.list()] == ["agent", "agent@0"]
            assert client.chat.completions.retrieve(reply.id).id == reply.id
            return reply.id

    assert stored(strop, await asyncio.to_thread(ask)).status == "complete"


async def test_an_unknown_model_is_a_404_that_names_the_models(strop: Running):
    with pytest.raises(NotFoundError) as caught:
        await strop.client.chat.completions.create(model="gpt-nothing", messages=ASK)
    assert caught.value.code == "model_not_found"
    assert "agent@0" in caught.value.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": ASK}, "model"),
        ({"model": 7, "messages": ASK}, "model"),
        ({"model": "agent"}, "messages"),
        ({"model": "agent", "messages": "hi"}, "messages"),
        ({"model": "agent", "messages": []}, "messages"),
        ({"model": "agent", "messages": ["hi"]}, "messages[0]"),
        ({"model": "agent", "messages": [{"role": "boss", "content": ""}]}, "messages[0].role"),
        ({"model": "agent", "messages": [{"role": ["user"]}]}, "messages[0].role"),
        ({"model": "agent", "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"model": "agent", "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"model": "agent", "messages": ASK, "n": 0}, "n"),
        ({"model": "agent", "messages": ASK, "n": True}, "n"),
        ({"model": "agent", "messages": ASK, "n": 129}, "n"),
        ({"model": "agent", "messages": ASK, "n": "2"}, "n"),
        ({"model": "agent", "messages": ASK, "max_tokens": 0}, "max_tokens"),
        ({"model": "agent", "messages": ASK, "temperature": "hot"}, "temperature"),
        ({"model": "agent", "messages": ASK, "stream": "yes"}, "stream"),
        ({"model": "agent", "messages": ASK, "metadata": []}, "metadata"),
        ({"model": "agent", "messages": ASK, "stream_options": 1}, "stream_options"),
        ({"model": "agent", "messages": ASK, "response_format": "json"}, "response_format"),
        ({"model": "agent", "messages": ASK, "metadata": {"trajectory_id": 5}}, "metadata"),
        ({"model": "agent", "messages": ASK, "metadata": {"split": "dev"}}, "metadata.split"),
    ],
)
async def test_a_bad_request_names_the_field(strop: Running, body, param):
    status, answer = await strop.post("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model": NaN}'])
async def test_a_body_that_is_no_json_object_is_a_400(strop: Running, raw):
    async with strop.http.post(strop.url + "/v1/chat/completions", data=raw) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_a_413(make_strop: MakeStrop):
    async with make_strop(max_body_bytes=2000) as strop:
        status, answer = await strop.post("/v1/chat/completions", {"x": "y" * 3000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_an_error_of_vllm_reaches_the_client_as_it_was_and_is_logged(strop: Running):
    with pytest.raises(BadRequestError) as caught:
        await strop.client.chat.completions.create(
            model="agent", messages=ASK, max_tokens=5, temperature=-3
        )
    completion_id = caught.value.response.headers["x-strop-completion"]
    row = stored(strop, completion_id)
    assert (row.status, row.http_status) == ("error", 400)
    assert row.response["error"]["message"] in caught.value.response.text.replace('\\"', '"')


async def test_a_failing_vllm_is_passed_on_with_its_status(strop: Running):
    strop.vllm.faults.status_times = 1
    strop.vllm.faults.status = 429
    with pytest.raises(APIStatusError) as caught:
        await strop.client.chat.completions.create(model="agent", messages=ASK)
    assert caught.value.status_code == 429


async def test_ids_that_do_not_agree_are_served_stored_and_marked(strop: Running):
    for fault in ("mismatch", "wrong_usage"):
        setattr(strop.vllm.faults, fault, True)
        for stream in (False, True):
            reply = await strop.client.chat.completions.with_raw_response.create(
                model="agent", messages=ASK, max_tokens=5, stream=stream
            )
            if stream:
                _ = [chunk async for chunk in reply.parse()]
            assert stored(strop, reply.headers["x-strop-completion"]).reason == "no_token_ids"
        setattr(strop.vllm.faults, fault, False)
    strop.vllm.faults.drop_token_ids = True
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=5)
    row = stored(strop, reply.id)
    assert (row.reason, row.choices[0].token_ids) == ("no_token_ids", None)


async def test_an_answer_of_another_model_is_an_error(strop: Running):
    strop.vllm.faults.wrong_model_name = "other"
    for stream in (False, True):
        with pytest.raises(APIStatusError) as caught:
            await strop.client.chat.completions.create(
                model="agent", messages=ASK, max_tokens=5, stream=stream
            )
        assert caught.value.status_code == 502
        assert caught.value.code == "wrong_version"


async def test_broken_json_of_vllm_is_a_502_and_is_logged(strop: Running):
    strop.vllm.faults.broken_json = True
    with pytest.raises(APIStatusError) as caught:
        await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=5)
    assert caught.value.status_code == 502
    with strop.gateway.database.read() as connection:
        group = queries.groups(connection, "default", now=0)[0]
    assert group.trajectories == 1


async def test_a_stream_that_vllm_breaks_off_tells_the_client_and_keeps_what_came(strop: Running):
    strop.vllm.faults.die_mid_stream = 3
    stream = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=30, stream=True
    )
    with pytest.raises(APIError) as caught:
        async for chunk in stream:
            completion_id = chunk.id
    assert "broke off" in caught.value.message
    row = stored(strop, completion_id)
    assert (row.status, row.reason) == ("aborted", "aborted")
    assert row.choices[0].token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_aborts_vllm_and_is_logged(strop: Running, stream):
    strop.vllm.faults.slow = 0.4
    trajectory = f"hang-up-{stream}"
    request = strop.client.chat.completions.create(
        model="agent",
        messages=ASK,
        max_tokens=200,
        stream=stream,
        extra_headers={"X-Strop-Trajectory": trajectory},
    )
    if stream:
        reply = await request
        async for _ in reply:
            break
        await reply.close()
    else:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, 0.3)
    for _ in range(100):
        with strop.gateway.database.read() as connection:
            found = queries.trajectory(connection, "default", trajectory)
        if found is not None:
            break
        await asyncio.sleep(0.05)
    (row,) = found.completions
    assert (row.status, row.reason) == ("aborted", "aborted")
    for _ in range(100):
        if strop.vllm.stats["aborted"]:
            break
        await asyncio.sleep(0.05)
    assert strop.vllm.stats["aborted"] == 1


async def test_biased_sampling_is_served_and_marked(strop: Running):
    for options in ({"top_p": 0.5}, {"temperature": 0}, {"extra_body": {"top_k": 3}}):
        reply = await strop.client.chat.completions.create(
            model="agent", messages=ASK, max_tokens=5, **options
        )
        assert stored(strop, reply.id).reason == "biased_sampling"
    reply = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=5, temperature=0.7
    )
    row = stored(strop, reply.id)
    assert (row.reason, row.sampling["temperature"]) == (None, 0.7)


async def test_a_policy_says_how_to_sample_what_does_not_say_it_itself(make_strop: MakeStrop):
    config = PolicyConfig(sampling={"temperature": 0.5, "max_tokens": 4})
    async with make_strop(policies={"agent": config}) as strop:
        reply = await strop.client.chat.completions.create(model="agent", messages=ASK)
        row = stored(strop, reply.id)
        assert (row.sampling["temperature"], row.reason) == (0.5, None)
        assert "asked" not in row.sampling
        assert reply.usage.completion_tokens <= 4
        reply = await strop.client.chat.completions.create(
            model="agent", messages=ASK, max_completion_tokens=2, temperature=1.5
        )
        row = stored(strop, reply.id)
        assert (row.sampling["temperature"], row.sampling["asked"]) == (1.5, ["temperature"])
        assert reply.usage.completion_tokens <= 2


async def test_no_vllm_is_a_503_with_retry_after(strop: Running):
    await strop.vllm.stop()
    with pytest.raises(APIStatusError) as caught:
        await strop.client.chat.completions.create(model="agent", messages=ASK)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]
    status, body = await strop.get("/readyz")
    assert status == 503
    assert body["problems"]


async def test_a_stored_reply_is_what_the_client_got(strop: Running):
    reply = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=6, metadata={"customer": "7"}
    )
    again = await strop.client.chat.completions.retrieve(reply.id)
    assert again.choices == reply.choices
    assert again.usage == reply.usage
    assert again.metadata == {"customer": "7"}
    with pytest.raises(NotFoundError):
        await strop.client.chat.completions.retrieve("chatcmpl-unknown")


def test_the_toy_tokenizer_gives_a_token_a_byte():
    assert len(encode("abc")) == 3
