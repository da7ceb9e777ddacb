"""How completions find their trajectory and group."""

import asyncio

import pytest

from gateway.capture.threads import normalise
from gateway.settings import PolicyConfig
from gateway.store import queries
from tests.gateway.conftest import MakeStrop, Running

ASK = [{"role": "user", "content": "Find the invoice."}]


async def ask(strop: Running, messages=ASK, path: str | None = None, **options):
    client = strop.client
    if path is not None:
        client = client.with_options(base_url=strop.url + path)
    raw = await client.chat.completions.with_raw_response.create(
        model="agent", messages=messages, max_tokens=6, **options
    )
    trajectory = place(strop, raw.headers["x-strop-trajectory"])
    return raw.parse(), trajectory


def place(strop: Running, trajectory_id: str):
    with strop.gateway.database.read() as connection:
        return queries.trajectory(connection, "default", trajectory_id)


async def test_the_path_names_both(strop: Running):
    _, found = await ask(strop, path="/rollouts/g1/t1/v1")
    assert (found.group_id, found.id, found.attribution) == ("g1", "t1", "path")


async def test_headers_name_both_and_more(strop: Running):
    headers = {
        "X-Strop-Trajectory": "t2",
        "X-Strop-Group": "g2",
        "X-Strop-Parent": "t1",
        "X-Strop-Split": "eval",
    }
    _, found = await ask(strop, extra_headers=headers)
    assert (found.id, found.group_id, found.parent_id, found.split, found.attribution) == (
        "t2",
        "g2",
        "t1",
        "eval",
        "header",
    )


async def test_metadata_names_both(strop: Running):
    metadata = {"trajectory_id": "t3", "group_id": "g3", "parent_trajectory_id": "t0"}
    _, found = await ask(strop, metadata=metadata)
    assert (found.id, found.group_id, found.parent_id) == ("t3", "g3", "t0")


async def test_a_traceparent_names_the_trajectory(strop: Running):
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    header = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    _, found = await ask(strop, extra_headers=header)
    assert (found.id, found.attribution) == (trace, "traceparent")
    for ignored in (
        "rubbish",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"ff-{trace}-00f067aa0ba902b7-01",
    ):
        _, found = await ask(strop, extra_headers={"traceparent": ignored})
        assert found.attribution == "new"


async def test_each_of_the_two_is_named_by_the_first_that_names_it(strop: Running):
    _, found = await ask(
        strop,
        extra_headers={"X-Strop-Group": "of-header", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
        metadata={"trajectory_id": "of-metadata", "group_id": "of-metadata"},
    )
    assert (found.id, found.group_id) == ("of-metadata", "of-header")


async def test_a_conversation_that_goes_on_joins_its_trajectory(strop: Running):
    first, began = await ask(strop)
    answer = first.choices[0].message.content
    for echo in (
        {"role": "assistant", "content": answer},
        {"content": answer + " \n", "role": "assistant", "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ):
        messages = [*ASK, echo, {"role": "user", "content": f"And? {len(echo)}"}]
        _, found = await ask(strop, messages)
        assert found.id == began.id
        assert found.completions[-1].parent_id == first.id
    _, other = await ask(strop, [*ASK, {"role": "assistant", "content": "Other."}, *ASK])
    assert other.id != began.id


async def test_a_continuation_is_found_in_the_database_after_a_restart(strop: Running):
    first, began = await ask(strop)
    strop.gateway.placements.__init__(strop.gateway.database)
    messages = [*ASK, {"role": "assistant", "content": first.choices[0].message.content}, *ASK]
    _, found = await ask(strop, messages)
    assert found.id == began.id
    # Stored as what is new, read back whole.
    assert found.completions[1].messages == messages
    assert len(found.completions[1].prompt_ids) == found.completions[1].prompt_tokens


async def test_equal_first_prompts_are_trajectories_of_one_group(strop: Running):
    results = await asyncio.gather(*(ask(strop) for _ in range(4)))
    assert len({found.id for _, found in results}) == 4
    assert len({found.group_id for _, found in results}) == 1
    _, other = await ask(strop, [{"role": "user", "content": "Something else."}])
    assert other.group_id not in {found.group_id for _, found in results}


async def test_threads_that_end_alike_are_continued_one_each(strop: Running):
    strop.vllm.faults.slow = 0
    options = {"seed": 1, "temperature": 0}
    (one, began), (two, other) = await ask(strop, **options), await ask(strop, **options)
    assert one.choices[0].message.content == two.choices[0].message.content
    messages = [*ASK, {"role": "assistant", "content": one.choices[0].message.content}, *ASK]
    found = {(await ask(strop, messages, **options))[1].id for _ in range(2)}
    assert found == {began.id, other.id}


async def test_a_rewritten_history_is_a_new_thread_of_a_known_trajectory(strop: Running):
    known = {"extra_headers": {"X-Strop-Trajectory": "episode"}}
    first, _ = await ask(strop, **known)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second, found = await ask(strop, [*ASK, answer, *ASK], **known)
    assert found.completions[-1].parent_id == first.id
    compacted = [{"role": "user", "content": "So far: nothing. Go on."}]
    third, found = await ask(strop, compacted, **known)
    assert [(c.id, c.parent_id) for c in found.completions] == [
        (first.id, None),
        (second.id, first.id),
        (third.id, None),
    ]
    # What goes on from there continues the new thread.
    answer = {"role": "assistant", "content": third.choices[0].message.content}
    _, found = await ask(strop, [*compacted, answer, *ASK], **known)
    assert found.completions[-1].parent_id == third.id


async def test_few_shot_answers_in_a_first_prompt_are_part_of_the_task(strop: Running):
    shots = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    _, one = await ask(strop, [*shots, {"role": "user", "content": "2+2?"}])
    _, two = await ask(strop, [*shots, {"role": "user", "content": "3+3?"}])
    _, three = await ask(strop, [*shots, {"role": "user", "content": "3+3?"}])
    assert one.group_id != two.group_id
    assert two.group_id == three.group_id
    assert len({one.id, two.id, three.id}) == 3


async def test_side_calls_are_logged_and_never_trained_on(make_strop: MakeStrop):
    title = [{"role": "system", "content": "Write a title for this chat."}, *ASK]
    config = PolicyConfig(side_calls=["[Tt]itle for"])
    async with make_strop(policies={"agent": config}) as strop:
        for messages, options in (
            (ASK, {"extra_headers": {"X-Strop-Train": "false"}}),
            (ASK, {"metadata": {"train": "false"}}),
            (title, {}),
        ):
            _, found = await ask(strop, messages, **options)
            assert [c.reason for c in found.completions] == ["side_call"]
        _, found = await ask(strop, [{"role": "system", "content": "Find mail."}, *ASK])
        assert found.completions[0].reason is None
        body = {"model": "agent", "messages": ASK, "metadata": {"train": "maybe"}}
        status, answer = await strop.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "metadata.train")


@pytest.mark.parametrize("value", ["", "   ", "x" * 300, "a\tb"])
async def test_ids_that_cannot_be_ids_are_refused(strop: Running, value):
    status, body = await strop.post(
        "/v1/chat/completions",
        {"model": "agent", "messages": ASK, "metadata": {"group_id": value}},
    )
    assert status == 400
    assert "group id" in body["error"]["message"]


def test_what_clients_change_in_an_echo_does_not_matter():
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":1, "b":2}'},
    }
    same = {"id": "c1", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}, "index": 0}
    assert normalise({"role": "assistant", "content": None, "tool_calls": [call]}) == normalise(
        {"role": "assistant", "content": "", "tool_calls": [same], "audio": None, "annotations": []}
    )
    assert normalise({"role": "user", "content": "a"}) != normalise(
        {"role": "user", "content": "b"}
    )
