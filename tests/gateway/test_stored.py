"""OpenAI's stored completions, through OpenAI's own client."""

import asyncio

import pytest
from openai import NotFoundError

from gateway.store.ids import new_id
from tests.gateway.conftest import Running


async def ask(strop: Running, text: str = "Hello.", model: str = "agent", **options):
    return await strop.client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=4, **options
    )


async def listed(strop: Running, **options) -> list[str]:
    return [item.id async for item in strop.client.chat.completions.list(**options)]


async def delete(strop: Running, path: str):
    async with strop.http.delete(strop.url + path) as response:
        return response.status, await response.json()


async def test_completions_are_listed_over_all_pages_and_in_both_directions(strop: Running):
    ids = [(await ask(strop, f"Number {n}.")).id for n in range(5)]
    assert await listed(strop, limit=2) == ids
    assert await listed(strop, limit=2, order="desc") == ids[::-1]
    page = await strop.client.chat.completions.list(limit=2, after=ids[2])
    assert ([item.id for item in page.data], page.has_more) == (ids[3:], False)
    _, body = await strop.get("/v1/chat/completions?limit=2")
    assert (body["object"], body["first_id"], body["last_id"]) == ("list", ids[0], ids[1])


async def test_a_listed_completion_is_the_one_that_was_answered(strop: Running):
    reply = await ask(strop, metadata={"user": "ada"})
    (item,) = (await strop.client.chat.completions.list()).data
    assert item.choices[0].message.content == reply.choices[0].message.content
    assert item.usage == reply.usage
    assert item.model == "agent@0"
    assert item.metadata == {"user": "ada"}


async def test_an_empty_page_is_a_page(strop: Running):
    status, body = await strop.get("/v1/chat/completions")
    assert (status, body["data"], body["has_more"]) == (200, [], False)


async def test_the_list_is_filtered_by_model_and_metadata(strop: Running):
    ada = await ask(strop, metadata={"user": "ada", "run": "1"})
    await ask(strop, metadata={"user": "bob", "run": "1"})
    await ask(strop)
    assert await listed(strop, metadata={"user": "ada"}) == [ada.id]
    assert await listed(strop, metadata={"user": "ada", "run": "2"}) == []
    assert len(await listed(strop, metadata={"run": "1"}, limit=1)) == 2
    assert len(await listed(strop, model="agent")) == 3
    assert len(await listed(strop, model="agent@0")) == 3
    assert await listed(strop, model="agent@1") == []
    assert await listed(strop, model="other") == []


async def test_failures_are_listed_when_they_are_asked_for(strop: Running):
    await ask(strop)
    await strop.vllm.stop()
    status, _ = await strop.post(
        "/v1/chat/completions", {"model": "agent", "messages": [{"role": "user", "content": "x"}]}
    )
    assert status == 503
    _, body = await strop.get("/v1/chat/completions")
    assert len(body["data"]) == 1
    _, body = await strop.get("/v1/chat/completions?status=error")
    assert [item["choices"] for item in body["data"]] == [[]]
    _, body = await strop.get("/v1/chat/completions?status=any")
    assert len(body["data"]) == 2


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("order=up", "order"),
        ("metadata=ada", "metadata"),
        ("metadata[a%22b]=c", "metadata"),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused_by_field(strop: Running, query, param):
    status, body = await strop.get(f"/v1/chat/completions?{query}")
    assert status in (400, 422)
    assert body["error"]["param"] == param


async def test_everything_can_be_deleted_while_it_is_listed(strop: Running):
    await asyncio.gather(*(ask(strop, f"Number {n}.") for n in range(7)))
    async for item in strop.client.chat.completions.list(limit=2):
        gone = await strop.client.chat.completions.delete(item.id)
        assert (gone.id, gone.deleted) == (item.id, True)
    assert await listed(strop) == []


async def test_a_deleted_completion_is_gone(strop: Running):
    reply = await ask(strop)
    await strop.client.chat.completions.delete(reply.id)
    chat = strop.client.chat.completions
    for call in (
        chat.retrieve(reply.id),
        chat.delete(reply.id),
        chat.update(reply.id, metadata={}),
        chat.messages.list(reply.id),
    ):
        with pytest.raises(NotFoundError, match="Use the id of a response"):
            await call
    status, _ = await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": 1.0})
    assert status == 404


async def test_deleting_a_turn_leaves_the_later_ones_whole(strop: Running):
    messages, replies = [], []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}."})
        reply = await strop.client.chat.completions.create(
            model="agent", messages=messages, max_tokens=4
        )
        replies.append(reply)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    _, before = await strop.get(f"/v1/chat/completions/{replies[2].id}")
    trajectory = f"/v1/trajectories/{before['strop']['trajectory_id']}?tokens=true"
    _, whole = await strop.get(trajectory)
    await strop.client.chat.completions.delete(replies[1].id)
    _, left = await strop.get(trajectory)
    kept = [whole["completions"][0], whole["completions"][2]]
    kept[1]["strop"]["parent_id"] = replies[0].id
    assert left["completions"] == kept


async def test_messages_are_listed_with_ids_of_their_own(strop: Running):
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        },
    ]
    reply = await strop.client.chat.completions.create(
        model="agent", messages=messages, max_tokens=4
    )
    found = [m async for m in strop.client.chat.completions.messages.list(reply.id, limit=1)]
    assert [(m.id, m.role, m.content) for m in found] == [
        (f"{reply.id}-0", "system", "Be brief."),
        (f"{reply.id}-1", "user", "Hello"),
    ]
    assert found[0].content_parts is None
    assert [part.text for part in found[1].content_parts] == ["Hel", "lo"]
    page = await strop.client.chat.completions.messages.list(reply.id, order="desc")
    assert [m.id for m in page.data] == [f"{reply.id}-1", f"{reply.id}-0"]
    status, body = await strop.get(f"/v1/chat/completions/{reply.id}/messages?after=x")
    assert (status, body["error"]["param"]) == (400, "after")


async def test_metadata_is_replaced_and_found_by(strop: Running):
    reply = await ask(strop, metadata={"user": "ada"})
    changed = await strop.client.chat.completions.update(reply.id, metadata={"user": "bob"})
    assert (changed.id, changed.metadata) == (reply.id, {"user": "bob"})
    assert await listed(strop, metadata={"user": "bob"}) == [reply.id]
    assert await listed(strop, metadata={"user": "ada"}) == []
    changed = await strop.client.chat.completions.update(reply.id, metadata=None)
    assert changed.metadata == {}
    for body in ({}, {"metadata": {"user": 5}}, {"metadata": {}, "model": "x"}):
        status, _ = await strop.post(f"/v1/chat/completions/{reply.id}", body)
        assert status == 422


async def test_a_person_can_be_forgotten_by_metadata(strop: Running):
    name = new_id("user ")
    for n in range(3):
        await ask(strop, f"Number {n}.", metadata={"user": name})
    kept = await ask(strop, metadata={"user": "other"})
    _, body = await delete(strop, f"/v1/chat/completions?metadata[user]={name}")
    assert (body["completions"], body["trajectories"]) == (3, 3)
    assert await listed(strop) == [kept.id]
    _, body = await delete(strop, f"/v1/chat/completions?metadata[user]={name}")
    assert body["completions"] == 0


async def test_deleting_by_metadata_goes_on_past_one_batch(strop: Running, monkeypatch):
    monkeypatch.setattr("gateway.api.stored._DELETED_AT_ONCE", 2)
    for n in range(5):
        await ask(strop, f"Number {n}.", metadata={"user": "ada"})
    _, body = await delete(strop, "/v1/chat/completions?metadata[user]=ada")
    assert body["completions"] == 5


async def test_deleting_without_saying_what_deletes_nothing(strop: Running):
    reply = await ask(strop)
    status, body = await delete(strop, "/v1/chat/completions")
    assert (status, body["error"]["param"]) == (400, "metadata")
    assert "Nothing was deleted" in body["error"]["message"]
    assert await listed(strop) == [reply.id]


async def test_a_trajectory_is_deleted_whole(strop: Running):
    await ask(strop, extra_headers={"X-Strop-Trajectory": "episode"})
    await ask(strop, "Again.", extra_headers={"X-Strop-Trajectory": "episode"})
    await strop.post("/v1/rewards", {"trajectory_id": "episode", "reward": 1.0})
    status, body = await delete(strop, "/v1/trajectories/episode")
    assert (status, body["completions"], body["deleted"]) == (200, 2, True)
    assert await listed(strop) == []
    assert (await strop.get("/v1/trajectories/episode"))[0] == 404
    assert (await delete(strop, "/v1/trajectories/episode"))[0] == 404


async def test_other_methods_are_still_refused(strop: Running):
    async with strop.http.put(strop.url + "/v1/chat/completions") as response:
        assert response.status == 405


async def test_what_is_old_is_deleted_over_the_api_and_what_came_later_is_kept(strop: Running):
    old, kept = "/v1/trajectories/old", "/v1/trajectories/kept"
    await ask(strop, extra_headers={"X-Strop-Trajectory": "kept"})
    await ask(strop, extra_headers={"X-Strop-Trajectory": "old"})
    _, shown = await strop.get(old)
    before = shown["updated_at"] + 1e-3
    await asyncio.sleep(2e-3)
    # A later turn keeps a trajectory that began earlier.
    await ask(strop, "Again.", extra_headers={"X-Strop-Trajectory": "kept"})
    status, body = await delete(strop, f"/v1/trajectories?before={before!r}")
    assert (status, body["completions"], body["trajectories"]) == (200, 1, 1)
    assert [(await strop.get(path))[0] for path in (old, kept)] == [404, 200]
    for asked in ("", "?before=nan", "?before=soon"):
        status, body = await delete(strop, f"/v1/trajectories{asked}")
        assert status in (400, 422), body
        assert "before" in body["error"]["param"]
    assert (await strop.get(kept))[0] == 200
