"""`GET /v1/why/{id}` and `strop why`."""

import json

from gateway.store import census
from tests.gateway.conftest import Running
from tests.gateway.test_cli import ASK, strop_command


async def test_why_says_what_a_reply_waits_for(strop: Running):
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=3)
    status, body = await strop.get(f"/v1/why/{reply.id}")
    assert status == 200
    (found,) = body["data"]
    assert (found["object"], found["kind"], found["state"]) == ("why", "completion", "waiting")
    assert "It has no reward yet" in " ".join(found["sentences"])
    result = await strop_command(strop, "why", reply.id)
    assert result.exit_code == 0
    assert "waiting" in result.output
    assert "no reward yet" in result.output
    printed = json.loads((await strop_command(strop, "why", reply.id, "--json")).output)
    assert printed["data"][0]["id"] == reply.id


async def test_an_id_that_there_is_not_is_a_404_in_words(strop: Running):
    status, body = await strop.get("/v1/why/chatcmpl-nothing")
    assert status == 404
    assert "Nor is there a trajectory or group" in body["error"]["message"]
    assert (await strop_command(strop, "why", "nothing")).exit_code == 1


async def test_ids_of_other_surfaces_are_understood(strop: Running):
    answer = await strop.client.responses.create(model="agent", input="Hello.")
    status, body = await strop.get(f"/v1/why/{answer.id}")
    assert status == 200
    assert body["data"][0]["kind"] == "completion"


async def test_choices_wait_for_each_other_and_are_then_ready_everywhere(strop: Running):
    reply = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=3, n=3
    )

    async def state() -> str:
        (group,) = (await strop.get("/v1/groups"))[1]["data"]
        return group["state"]

    async def reward(choice: int) -> None:
        body = {"completion_id": reply.id, "choice": choice, "reward": choice / 2}
        assert (await strop.post("/v1/rewards", body))[0] == 201

    async def why() -> str:
        (found,) = (await strop.get(f"/v1/why/{reply.id}"))[1]["data"]
        return " ".join(found["sentences"])

    await reward(0)
    assert "has 1 of the 3 rewarded choices that make it ready; 2 more wait" in await why()
    assert await state() == "open"
    await reward(1)
    await reward(2)
    text = await why()
    assert "It is ready" in text or "when nothing was added to it" in text
    assert await state() == "ready"
    listed = await strop_command(strop, "group", "list", "--json")
    assert json.loads(listed.output)["data"][0]["state"] == "ready"
    with strop.gateway.database.read() as connection:
        found = census.take(connection)
    assert found.groups == {("default", "agent", "ready", ""): 1}
    assert set(found.oldest_ready) == {("default", "agent")}
