"""A gateway that judges: by a provider's model through LiteLLM, and by a policy of its own."""

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web

from gateway.backends.providers import Provider
from gateway.judge.asking import Asker, NotNow
from gateway.settings import PolicyConfig
from gateway.store.judge_settings import Judge
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.conftest import make_strop as make_strop
from tests.gateway.conftest import strop as strop
from tests.gateway.conftest import toy_base as toy_base


class Model:
    """An OpenAI server whose only answer is a ranking, in the order of the ids."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        names = sorted(re.findall(r"<attempt id=(\w+)>", body["messages"][1]["content"]))
        ranking = {"ranking": [{"id": name, "reason": f"{name} is so"} for name in names]}
        message = {"role": "assistant", "content": json.dumps(ranking)}
        usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "gpt-4o",
             "choices": choices, "usage": usage}
        )  # fmt: skip


@pytest.mark.timeout(180)
async def test_a_group_is_judged_by_a_model_of_another_provider(
    make_strop: MakeStrop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    model = Model()
    async with model as address:
        provider = Provider(model="openai/gpt-4o", api_base=address, api_key_env="JUDGE_KEY")
        judge = Judge(model="big", settle_seconds=0.0, presentations=2)
        policies = {"agent": PolicyConfig(group_size=3, judge=judge)}
        async with make_strop(
            providers={"big": provider}, policies=policies, judge_poll=0.05
        ) as strop:
            ids = [await ask(strop, n) for n in range(3)]
            found = await judged(strop, ids)
            assert len(model.asked) == 2
            assert model.asked[0]["model"] == "gpt-4o"
            assert sorted(reward["reward"] for reward in found) == [0.0, 0.5, 1.0]
            assert {reward["source"] for reward in found} == {"judge"}
            assert all("is so" in reward["comment"] for reward in found)
            from sqlalchemy import func, select

            from gateway.store.tracing_models import JudgeCall

            with strop.gateway.database.read() as connection:
                cost = connection.execute(select(func.sum(JudgeCall.cost))).scalar_one()
            # The listed price of what the usage says.
            assert cost == pytest.approx(2 * (1000 * 2.5e-6 + 100 * 1e-5))


async def ask(strop: Running, number: int) -> str:
    reply = await strop.client.chat.completions.create(
        model="agent",
        messages=[{"role": "user", "content": "Sell me something."}],
        max_tokens=6,
        seed=number,
        extra_headers={"x-strop-trajectory": f"t{number}", "x-strop-group": "g"},
    )
    return reply.id


async def judged(strop: Running, ids: list[str]) -> list[dict[str, Any]]:
    async with asyncio.timeout(120):
        while True:
            found = []
            for number in range(len(ids)):
                _, body = await strop.get(f"/v1/rewards?trajectory_id=t{number}")
                found += body["data"]
            if len(found) == len(ids):
                return found
            await asyncio.sleep(0.05)


async def test_a_policy_of_its_own_is_asked_on_its_replicas(strop: Running):
    gateway = strop.gateway
    asker = Asker({}, gateway.publisher, gateway.pool)
    body = {"model": "agent", "messages": [{"role": "user", "content": "Judge."}], "max_tokens": 4}
    answer = await asker.ask("default", body)
    assert answer.body["model"] == "agent@0"
    assert answer.cost == 0.0
    # It is no completion of the policy's, and no trainer will see it.
    _, listed = await strop.get("/v1/chat/completions")
    assert listed["data"] == []
    with pytest.raises(NotNow, match="neither a provider nor served"):
        await asker.ask("default", {**body, "model": "nobody"})
    with pytest.raises(NotNow, match="answered 400"):
        await asker.ask("default", {**body, "messages": 7})
    gateway.pool.replicas[0].lost("gone")
    with pytest.raises(NotNow):
        await asker.ask("default", body)
