"""What a request gets is the same whatever else is in the batch."""

import asyncio

import pytest

from tests.contract.conftest import Server


async def test_prompt_logprobs_are_the_same_beside_other_requests(server: Server) -> None:
    ids = (await server.chat(max_tokens=1))["prompt_token_ids"]
    names = [await server.load(server.adapter(str(seed), seed=seed)) for seed in (1, 2)]
    both = (*names, "base")
    alone = [await server.prompt_logprobs(name, ids) for name in both]
    # Long ones are under way when the prompts come, and more come with them.
    *_, first, second, third = await asyncio.gather(
        *(server.chat(f"Count to {n}.", model=both[n % 3], max_tokens=32) for n in range(12)),
        *(server.prompt_logprobs(name, ids) for name in both),
    )
    for one, other in zip(alone, (first, second, third), strict=True):
        assert one == pytest.approx(other, abs=1e-3)
