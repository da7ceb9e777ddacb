"""`POST /v1/rewards`."""

import pytest

from gateway.store import queries
from tests.gateway.conftest import Running

ASK = [{"role": "user", "content": "Rate me."}]


@pytest.fixture
async def completion(strop: Running) -> str:
    reply = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=4, n=2
    )
    return reply.id


async def count(strop: Running, completion_id: str) -> int:
    _, body = await strop.get(f"/v1/rewards?completion_id={completion_id}")
    return len(body["data"])


async def test_a_reward_is_stored_and_shown(strop: Running, completion: str):
    status, body = await strop.post(
        "/v1/rewards",
        {"completion_id": completion, "reward": 0.5, "choice": 1, "comment": "fine"},
    )
    assert status == 201
    assert (body["reward"], body["name"], body["choice"]) == (0.5, "reward", 1)
    _, shown = await strop.get(f"/v1/chat/completions/{completion}")
    assert [reward["id"] for reward in shown["strop"]["rewards"]] == [body["id"]]
    status, body = await strop.post(
        "/v1/rewards", {"trajectory_id": shown["strop"]["trajectory_id"], "reward": 1}
    )
    assert status == 201
    assert isinstance(body["reward"], float)
    with strop.gateway.database.read() as connection:
        trajectory = queries.trajectory(connection, "default", shown["strop"]["trajectory_id"])
    assert [reward.reward for reward in trajectory.rewards] == [0.5, 1.0]


@pytest.mark.parametrize("key", ["completion_id", "trajectory_id"])
async def test_an_unknown_id_is_a_404(strop: Running, key):
    status, body = await strop.post("/v1/rewards", {key: "nothing", "reward": 1.0})
    assert (status, body["error"]["param"]) == (404, key)


async def test_an_unknown_choice_is_a_404(strop: Running, completion: str):
    status, body = await strop.post(
        "/v1/rewards", {"completion_id": completion, "choice": 5, "reward": 1.0}
    )
    assert (status, body["error"]["param"]) == (404, "choice")


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", '"1.0"', "null", "true", "[1]", "1e999"]
)
async def test_a_reward_that_is_no_finite_number_is_a_422(strop: Running, completion: str, value):
    raw = f'{{"completion_id": "{completion}", "reward": {value}}}'
    async with strop.http.post(
        strop.url + "/v1/rewards", data=raw, headers={"content-type": "application/json"}
    ) as response:
        assert response.status == 422, await response.text()
        body = await response.json()
    assert body["error"]["param"] == "reward"
    assert await count(strop, completion) == 0


async def test_a_reward_needs_exactly_one_target(strop: Running, completion: str):
    for body in (
        {"reward": 1.0},
        {"reward": 1.0, "completion_id": completion, "trajectory_id": "t"},
        {"reward": 1.0, "trajectory_id": "t", "choice": 0},
        {"reward": 1.0, "completion_id": completion, "rewards": 2},
    ):
        status, _ = await strop.post("/v1/rewards", body)
        assert status == 422
    status, _ = await strop.post("/v1/rewards", [])
    assert status == 400


async def test_an_idempotency_key_counts_once(strop: Running, completion: str):
    body = {"completion_id": completion, "reward": 1.0, "idempotency_key": "k"}
    status, first = await strop.post("/v1/rewards", body)
    assert status == 201
    status, again = await strop.post("/v1/rewards", body)
    assert (status, again) == (200, first)
    status, error = await strop.post("/v1/rewards", {**body, "reward": 2.0})
    assert (status, error["error"]["param"]) == (409, "idempotency_key")
    assert await count(strop, completion) == 1


async def test_a_list_is_all_or_nothing(strop: Running, completion: str):
    good = {"completion_id": completion, "reward": 1.0}
    status, body = await strop.post("/v1/rewards", [good, {"completion_id": "no", "reward": 1.0}])
    assert (status, body["error"]["param"]) == (404, "[1].completion_id")
    status, body = await strop.post("/v1/rewards", [good, {**good, "reward": "x"}])
    assert status == 422
    assert await count(strop, completion) == 0
    status, body = await strop.post("/v1/rewards", [good, {**good, "name": "speed"}])
    assert status == 201
    assert [item["name"] for item in body["data"]] == ["reward", "speed"]
    assert await count(strop, completion) == 2


async def test_a_reward_can_be_posted_as_soon_as_a_stream_has_ended(strop: Running):
    for _ in range(20):
        async for chunk in await strop.client.chat.completions.create(
            model="agent", messages=ASK, max_tokens=3, stream=True
        ):
            completion_id = chunk.id
        status, _ = await strop.post("/v1/rewards", {"completion_id": completion_id, "reward": 1.0})
        assert status == 201
