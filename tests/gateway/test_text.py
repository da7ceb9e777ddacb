"""`POST /v1/completions`, as OpenAI's own client uses it."""

import asyncio

import pytest
from openai import APIError, APIStatusError, NotFoundError

from gateway.capture.request import Wants
from gateway.capture.translate_text import TextCapture
from gateway.store import queries
from tests.gateway.conftest import Running
from tests.toy_vllm.model import encode


def stored(strop: Running, completion_id: str):
    with strop.gateway.database.read() as connection:
        found = queries.completion(connection, "default", completion_id)
    assert found is not None
    return found


async def test_a_text_is_logged_with_its_tokens(strop: Running):
    reply = await strop.client.completions.create(model="agent", prompt="Once", max_tokens=6)
    row = stored(strop, reply.id)
    assert (row.messages, row.request["prompt"], row.reason) == ([], "Once", None)
    assert row.prompt_ids == encode("Once")
    assert len(row.prompt_ids) == reply.usage.prompt_tokens
    (choice,) = row.choices
    assert len(choice.token_ids) == len(choice.logprobs) == reply.usage.completion_tokens
    (shown,) = reply.choices
    assert shown.text == row.response["choices"][0]["text"]
    assert shown.logprobs is None
    assert "token_ids" not in shown.model_extra
    assert (reply.model, reply.object) == ("agent@0", "text_completion")


async def test_each_prompt_of_a_list_is_a_completion_of_its_own(strop: Running):
    reply = await strop.client.completions.create(
        model="agent", prompt=["One", "Two"], max_tokens=4, n=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    places = [
        (choice.model_extra["completion_id"], choice.model_extra["completion_choice"])
        for choice in reply.choices
    ]
    first, second = (stored(strop, places[at][0]) for at in (0, 2))
    assert [number for _, number in places] == [0, 1, 0, 1]
    assert reply.id == first.id != second.id
    assert (first.request["prompt"], second.request["prompt"]) == ("One", "Two")
    assert first.reason is second.reason is None
    sampled = sum(len(c.token_ids) for row in (first, second) for c in row.choices)
    assert sampled == reply.usage.completion_tokens
    status, _ = await strop.post(
        "/v1/rewards", {"completion_id": second.id, "choice": 1, "reward": 1.0}
    )
    assert status == 201


async def test_the_same_prompt_is_the_same_task(strop: Running):
    rows = []
    for prompt in ("A", "A", "B"):
        reply = await strop.client.completions.create(model="agent", prompt=prompt, max_tokens=3)
        row = stored(strop, reply.id)
        with strop.gateway.database.read() as connection:
            rows.append(queries.trajectory(connection, "default", row.trajectory_id))
    assert len({row.id for row in rows}) == 3
    assert rows[0].group_id == rows[1].group_id != rows[2].group_id


async def test_token_ids_go_in_and_come_out(strop: Running):
    reply = await strop.client.completions.create(
        model="agent",
        prompt=encode("Once"),
        max_tokens=4,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    row = stored(strop, reply.id)
    (choice,) = reply.choices
    assert choice.model_extra["token_ids"] == row.choices[0].token_ids
    assert choice.model_extra["prompt_token_ids"] == row.prompt_ids == encode("Once")
    assert choice.logprobs.token_logprobs == pytest.approx(row.choices[0].logprobs, abs=1e-5)
    several = await strop.client.completions.create(
        model="agent", prompt=[encode("a"), encode("b")], max_tokens=3
    )
    assert len(several.choices) == 2


async def test_a_stream_is_stored_as_the_reply_it_amounts_to(strop: Running):
    texts: dict[int, str] = {}
    usage = None
    async for chunk in await strop.client.completions.create(
        model="agent",
        prompt=["One", "Two"],
        max_tokens=8,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            last = choice.model_extra["completion_id"]
    row = stored(strop, last)
    assert row.stream
    assert row.reason is None
    assert row.response["choices"][0]["text"] == texts[1]
    logprobs = row.response["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs == pytest.approx(row.choices[0].logprobs, abs=1e-5)
    assert usage.prompt_tokens == 6


def test_the_logprobs_of_an_echoed_prompt_are_not_taken_for_the_answers():
    capture = TextCapture("cmpl-1", Wants(True, False, False, False), "agent@0", "agent@0", 1, 4)
    capture.take_body(
        {
            "id": "cmpl-x",
            "created": 3,
            "model": "agent@0",
            "choices": [
                {
                    "index": 0,
                    "text": "Once upon",
                    "token_ids": [9],
                    "prompt_token_ids": [7, 8],
                    "logprobs": {
                        "tokens": ["On", "ce", " upon"],
                        "token_logprobs": [None, -1.0, -2.0],
                        "top_logprobs": None,
                    },
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        }
    )
    assert capture.disagreement() is None
    assert capture.choices[0].logprobs == [-2.0]
    (shown,) = capture.response["choices"]
    assert (shown["index"], shown["text"], shown["completion_choice"]) == (4, "Once upon", 0)
    assert shown["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[True]]}, "prompt[0]"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "stream": 1}, "stream"),
        ({"prompt": "x", "metadata": []}, "metadata"),
        ({"prompt": "x", "model": None}, "model"),
    ],
)
async def test_a_bad_field_is_named(strop: Running, body, param):
    status, answer = await strop.post("/v1/completions", {"model": "agent", **body})
    assert status == 400
    assert answer["error"]["param"] == param


async def test_errors_are_logged_and_come_in_openais_format(strop: Running):
    with pytest.raises(NotFoundError):
        await strop.client.completions.create(model="gpt-nothing", prompt="x")
    with pytest.raises(APIStatusError) as caught:
        await strop.client.completions.create(model="agent", prompt=["x", "y"], temperature=-3)
    assert caught.value.status_code == 400
    assert "temperature" in caught.value.message
    strop.vllm.faults.wrong_model_name = "other"
    with pytest.raises(APIStatusError) as caught:
        await strop.client.completions.create(model="agent", prompt="z")
    assert (caught.value.status_code, caught.value.code) == (502, "wrong_version")
    with strop.gateway.database.read() as connection:
        groups = queries.groups(connection, "default", now=0)
    assert sum(group.trajectories for group in groups) == 3


async def test_a_stream_that_breaks_off_tells_the_client(strop: Running):
    strop.vllm.faults.die_mid_stream = 3
    stream = await strop.client.completions.create(
        model="agent", prompt="x", max_tokens=30, stream=True
    )
    with pytest.raises(APIError) as caught:
        async for chunk in stream:
            name = chunk.id
    assert "broke off" in caught.value.message
    row = stored(strop, name)
    assert (row.status, row.reason) == ("aborted", "aborted")
    assert row.choices[0].token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_aborts_vllm(strop: Running, stream):
    strop.vllm.faults.slow = 0.4
    request = strop.client.completions.create(
        model="agent",
        prompt="x",
        max_tokens=200,
        stream=stream,
        extra_headers={"X-Strop-Trajectory": f"gone-{stream}"},
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
            found = queries.trajectory(connection, "default", f"gone-{stream}")
        if found is not None and strop.vllm.stats["aborted"]:
            break
        await asyncio.sleep(0.05)
    assert [(row.status, row.http_status) for row in found.completions] == [("aborted", 499)]
