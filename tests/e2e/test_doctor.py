"""`strop doctor` on the real vLLM: nothing is wrong with the right flags, and a wrong one is found."""

import asyncio

import pytest

from gateway.commands import doctor_vllm
from gateway.commands.findings import Finding
from gateway.settings import PolicyConfig
from gateway.store.policy_settings import Lora
from tests.conftest import RealVllm
from tests.e2e.test_loop import Loop
from tests.e2e.test_real_client import loop

__all__ = ["loop"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def look(loop: Loop, rank: int) -> list[Finding]:
    policies = {"looked-at": PolicyConfig(lora=Lora(rank=rank))}
    settings = loop.gateway.settings.model_copy(update={"policies": policies})
    return await asyncio.to_thread(lambda: list(doctor_vllm.replicas(settings, None, {})))


async def test_the_flags_of_a_real_vllm_are_told_apart(loop: Loop, real_vllm: RealVllm):
    async with loop.http.get(real_vllm.url + "/v1/models") as response:
        before = [model["id"] for model in (await response.json())["data"]]
    found = await look(loop, rank=8)
    assert {one.level for one in found} == {"ok"}, found
    text = "\n".join(one.text for one in found)
    for part in ("it serves base", "token ids and logprobs", "sampled from", "of rank 8"):
        assert part in text
    (wrong,) = [one for one in await look(loop, rank=32) if one.level != "ok"]
    assert (wrong.level, wrong.fix) == ("error", "Start it with --max-lora-rank 32.")
    async with loop.http.get(real_vllm.url + "/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == before
