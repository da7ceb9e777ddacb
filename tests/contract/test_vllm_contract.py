"""What strop relies on in vLLM, held against the real one and against the fake of the other tests."""

import asyncio
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.conftest import Json, Server

CHAT = "/v1/chat/completions"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


def check_choice(choice: Json) -> int:
    """Ids and logprobs agree in number, which is returned."""
    ids, logprobs = choice["token_ids"], choice["logprobs"]["content"]
    assert len(ids) == len(logprobs) > 0
    for entry in logprobs:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"] == []
        assert isinstance(entry["token"], str)
    return len(ids)


def joined(chunks: list[Json]) -> dict[int, Json]:
    """What the chunks of a stream add up to, per choice."""
    found: dict[int, Json] = defaultdict(
        lambda: {"text": "", "ids": [], "logprobs": [], "prompt": None, "finish": None}
    )
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found[choice["index"]]
            one["text"] += choice["delta"].get("content") or ""
            ids = choice.get("token_ids") or []
            content = (choice["logprobs"] or {"content": []})["content"]
            assert len(ids) == len(content), "one to one in every chunk"
            one["ids"] += ids
            one["logprobs"] += [entry["logprob"] for entry in content]
            one["prompt"] = chunk.get("prompt_token_ids") or one["prompt"]
            one["finish"] = choice["finish_reason"] or one["finish"]
            one["stop"] = choice.get("stop_reason")
    return found


# -- tokens and logprobs -----------------------------------------------------------------------


async def test_reply_has_an_id_and_a_logprob_for_every_token(server: Server) -> None:
    reply = await server.chat()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "base"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["choices"][0]["message"]["role"] == "assistant"
    count = check_choice(reply["choices"][0])
    prompt = reply["prompt_token_ids"]
    assert reply["usage"]["completion_tokens"] == count
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["total_tokens"] == len(prompt) + count


async def test_stream_brings_the_same_tokens_as_the_reply(server: Server) -> None:
    reply = await server.chat(temperature=0)
    chunks = await server.stream(temperature=0)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["model"] for chunk in chunks} == {"base"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    one, choice = joined(chunks)[0], reply["choices"][0]
    assert one["ids"] == choice["token_ids"]
    assert one["text"] == choice["message"]["content"]
    assert one["finish"] == choice["finish_reason"]
    expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert one["logprobs"] == pytest.approx(expected, abs=1e-3)


async def test_ids_are_not_sent_unasked(server: Server) -> None:
    reply = await server.chat(return_token_ids=None, logprobs=None, top_logprobs=None)
    assert reply["prompt_token_ids"] is None
    assert reply["choices"][0]["token_ids"] is None
    assert reply["choices"][0]["logprobs"] is None
    chunks = await server.stream(return_token_ids=None, logprobs=None, top_logprobs=None)
    assert chunks[0]["prompt_token_ids"] is None
    assert chunks[-1]["choices"][0]["token_ids"] is None


async def test_several_choices_each_have_their_tokens(server: Server) -> None:
    reply = await server.chat(n=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    counts = [check_choice(choice) for choice in reply["choices"]]
    assert reply["usage"]["completion_tokens"] == sum(counts)
    assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


async def test_several_streamed_choices_each_have_their_tokens(server: Server) -> None:
    chunks = await server.stream(n=2, stream_options={"include_usage": True})
    found = joined(chunks[:-1])
    assert sorted(found) == [0, 1]
    assert found[0]["prompt"] == found[1]["prompt"] is not None
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == sum(len(one["ids"]) for one in found.values())
    assert usage["prompt_tokens"] == len(found[0]["prompt"])


async def test_usage_comes_in_a_last_chunk_without_choices(server: Server) -> None:
    chunks = await server.stream(stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert set(chunks[-1]["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in await server.stream())


async def test_end_of_sequence_has_an_id_and_a_logprob_but_no_text(server: Server) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    reply = await server.chat("Say only: hi", **fields)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert check_choice(choice) == reply["usage"]["completion_tokens"]
    assert choice["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    assert "<|im_end|>" not in choice["message"]["content"]
    last = (await server.stream("Say only: hi", **fields))[-1]["choices"][0]
    assert last["delta"].get("content", "") == ""
    assert last["token_ids"] == choice["token_ids"][-1:]
    assert last["finish_reason"] == "stop"


async def test_stop_string_ends_the_text_before_the_tokens(server: Server) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    full = (await server.chat("Tell a story.", **fields))["choices"][0]
    text = full["message"]["content"]
    stop = text[len(text) // 2 :][:2]
    reply = await server.chat("Tell a story.", stop=[stop], **fields)
    choice = reply["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    count = check_choice(choice)
    assert choice["token_ids"] == full["token_ids"][:count]
    assert reply["usage"]["completion_tokens"] == count
    sampled = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert stop in sampled
    streamed = joined(await server.stream("Tell a story.", stop=[stop], **fields))[0]
    assert streamed["text"] == choice["message"]["content"]
    assert streamed["ids"] == choice["token_ids"]
    assert (streamed["finish"], streamed["stop"]) == ("stop", stop)


async def test_chunk_without_text_can_still_bring_tokens(server: Server) -> None:
    # What might be the beginning of a stop string is held back, and its tokens are not.
    chunks = await server.stream(stop="never this, it is long", max_tokens=4, min_tokens=4)
    bringing = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0].get("token_ids")]
    assert any(not choice["delta"].get("content") for choice in bringing)
    assert joined(chunks)[0]["text"] != ""


async def test_logprobs_are_those_of_the_distribution_sampled_from(server: Server) -> None:
    """With top-k 1 only one token was possible, and at temperature 1 they are the model's own."""
    only = await server.chat(top_k=1, max_tokens=3)
    for entry in only["choices"][0]["logprobs"]["content"]:
        assert entry["logprob"] == pytest.approx(0, abs=1e-6)
    reply = await server.chat(max_tokens=6)
    prompt, choice = reply["prompt_token_ids"], reply["choices"][0]
    again = await server.prompt_logprobs("base", prompt + choice["token_ids"])
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert sampled == pytest.approx(again[len(prompt) - 1 :], abs=2e-3)


async def test_next_prompt_begins_with_this_prompt_and_answer(server: Server) -> None:
    messages = [{"role": "user", "content": "Name one colour."}]
    so_far: list[int] = []
    for _ in range(3):
        reply = await server.chat(messages=messages, temperature=0, max_tokens=40)
        assert reply["prompt_token_ids"][: len(so_far)] == so_far
        choice = reply["choices"][0]
        so_far = reply["prompt_token_ids"] + choice["token_ids"]
        messages += [
            {"role": "assistant", "content": choice["message"]["content"]},
            {"role": "user", "content": "And another?"},
        ]


async def test_same_seed_gives_the_same_tokens(server: Server) -> None:
    first, second = await server.chat(seed=3), await server.chat(seed=3)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


async def test_metadata_and_unknown_fields_are_accepted(server: Server) -> None:
    await server.chat(metadata={"group_id": "g"}, user="someone", no_such_field=1, max_tokens=1)


# -- adapters ----------------------------------------------------------------------------------


async def test_loaded_adapter_answers_under_its_name_until_it_is_unloaded(server: Server) -> None:
    path = server.adapter()
    status, body = await server.post(LOAD, {"lora_name": "policy@1", "lora_path": str(path)})
    assert (status, body) == (200, "Success: LoRA adapter 'policy@1' added successfully.")
    assert (await server.chat(model="policy@1", max_tokens=1))["model"] == "policy@1"
    chunks = await server.stream(model="policy@1", max_tokens=1)
    assert {chunk["model"] for chunk in chunks} == {"policy@1"}
    status, body = await server.post(UNLOAD, {"lora_name": "policy@1"})
    assert (status, body) == (200, "Success: LoRA adapter 'policy@1' removed successfully.")
    status, _ = await server.post(CHAT, server.body("hi", model="policy@1"))
    assert status == 404


async def test_zero_adapter_is_the_base_and_a_random_one_is_not(server: Server) -> None:
    ids = (await server.chat(max_tokens=1))["prompt_token_ids"][:12]
    base = await server.prompt_logprobs("base", ids)
    zero = await server.prompt_logprobs(await server.load(server.adapter("zero", zero=True)), ids)
    other = await server.prompt_logprobs(await server.load(server.adapter("one", seed=1)), ids)
    assert all(math.isfinite(value) for value in other)
    assert zero == pytest.approx(base, abs=1e-3)
    assert sum(abs(a - b) for a, b in zip(other, base, strict=True)) / len(base) > 0.02


async def test_models_lists_the_base_and_the_adapters(server: Server) -> None:
    path = server.adapter()
    name = await server.load(path)
    async with server.http.get(server.url + "/v1/models") as reply:
        body = await reply.json()
    assert body["object"] == "list"
    cards = {card["id"]: card for card in body["data"]}
    assert body["data"][0]["id"] == "base"
    assert cards["base"]["parent"] is None
    assert cards["base"]["max_model_len"] == 1024
    assert cards[name]["parent"] == "base"
    assert cards[name]["root"] == str(path)
    assert cards[name]["max_model_len"] is None


async def test_adapter_that_is_loaded_already_is_refused(server: Server) -> None:
    path = server.adapter()
    name = await server.load(path)
    status, body = await server.post(LOAD, {"lora_name": name, "lora_path": str(path)})
    assert status == 400
    assert body["error"] == {
        "message": f"The lora adapter '{name}' has already been loaded. If you want to load the "
        "adapter in place, set 'load_inplace' to True.",
        "type": "InvalidUserInput",
        "param": None,
        "code": 400,
    }


async def test_adapter_folder_that_is_missing_is_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    status, body = await server.post(LOAD, {"lora_name": "p@9", "lora_path": str(path)})
    assert status == 404
    assert body["error"]["type"] == "NotFoundError"
    # vLLM hides the paths of most folders in what it says.
    said = body["error"]["message"].replace(str(path), "<path>")
    assert said == "Loading lora p@9 failed: No adapter found for <path>"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("rank", "LoRA rank 16 is greater than max_lora_rank 8."),
        ("weights", "Error while deserializing header: header too small"),
        ("config", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("no weights", "doesn't contain tensors"),
    ],
)
async def test_broken_adapter_is_refused(server: Server, broken: str, message: str) -> None:
    path = server.adapter(rank=16 if broken == "rank" else 8)
    if broken == "weights":
        (path / "adapter_model.safetensors").write_bytes(b"garbage")
    elif broken == "config":
        (path / "adapter_config.json").write_text("{nope")
    elif broken == "no weights":
        (path / "adapter_model.safetensors").unlink()
    status, body = await server.post(LOAD, {"lora_name": "p@8", "lora_path": str(path)})
    assert (status, body["error"]["type"]) == (500, "InternalServerError")
    assert body["error"]["message"].startswith("Call to add_lora method failed: ")
    assert message in body["error"]["message"]


async def test_adapter_that_is_not_loaded_cannot_be_unloaded(server: Server) -> None:
    status, body = await server.post(UNLOAD, {"lora_name": "nope"})
    assert status == 404
    assert body["error"]["message"] == "The lora adapter 'nope' cannot be found."


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model_is_404(server: Server, stream: bool) -> None:
    status, body = await server.post(CHAT, server.body("hi", model="p@99", stream=stream))
    assert status == 404
    assert body["error"] == {
        "message": "The model `p@99` does not exist. Valid aliases: base.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"temperature": -1}, "temperature must be non-negative, got -1.0."),
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0."),
        ({"top_p": 2}, "top_p must be in (0, 1], got 2.0."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": 5000}, "max_tokens=5000 cannot be greater than max_model_len=1024."),
        ({"top_logprobs": 50}, "Requested sample logprobs of 50, which is greater than max"),
        ({"logprobs": None, "top_logprobs": 2}, "when using `top_logprobs`, `logprobs` must be"),
        ({"messages": []}, "Cannot apply chat template to an empty conversation."),
        ({"stream_options": {"include_usage": True}}, "Stream options can only be defined when"),
        ({"messages": [{"role": "user", "content": "red " * 3000}]}, "This model's maximum cont"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
async def test_bad_request_is_400(server: Server, fields: Json, message: str) -> None:
    status, body = await server.post(CHAT, server.body("hi", **fields))
    assert (status, body["error"]["type"]) == (400, "BadRequestError")
    assert body["error"]["code"] == 400
    assert body["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("fields", "where", "kind"),
    [
        ({"n": "two"}, "body.n", "int_parsing"),
        ({"temperature": "hot"}, "body.temperature", "float_parsing"),
        ({"messages": "hi"}, "body.messages", "list_type"),
        ({"messages": None}, "body.messages", "missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_wrong_type_is_400_and_names_the_field(
    server: Server, fields: Json, where: str, kind: str
) -> None:
    status, body = await server.post(CHAT, server.body("hi", **fields))
    assert (status, body["error"]["type"]) == (400, "Bad Request")
    assert body["error"]["param"] == where
    assert body["error"]["message"].startswith(f"1 validation error:\n  {{'type': '{kind}', ")


async def test_broken_json_is_400(server: Server) -> None:
    headers = {"content-type": "application/json"}
    async with server.http.post(server.url + CHAT, data=b"{nope", headers=headers) as reply:
        body = await reply.json()
    assert reply.status == 400
    assert "json_invalid" in body["error"]["message"]


async def test_unknown_role_is_accepted(server: Server) -> None:
    await server.chat(messages=[{"role": "boss", "content": "hi"}], max_tokens=1)


async def test_request_without_a_model_goes_to_the_base(server: Server) -> None:
    assert (await server.chat(model=None, max_tokens=1))["model"] == "base"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([99_999_999], "Token id 99999999 is out of vocabulary"),
        ([], "You must pass at least one prompt"),
    ],
)
async def test_bad_prompt_of_ids_is_400(server: Server, prompt: list[int], message: str) -> None:
    status, body = await server.post("/v1/completions", {"model": "base", "prompt": prompt})
    assert (status, body["error"]["message"]) == (400, message)


# -- hanging up --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_request_ends_when_the_client_hangs_up(server: Server, stream: bool) -> None:
    if server.fake is not None:
        server.fake.faults.slow = 0.05
    body = server.body("Tell a story.", stream=stream, max_tokens=500, ignore_eos=True)
    async with aiohttp.ClientSession() as session:

        async def ask() -> None:
            async with session.post(server.url + CHAT, json=body) as reply:
                await reply.read()

        asking = asyncio.create_task(ask())
        await server.until_in_flight(1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await server.until_in_flight(0)
