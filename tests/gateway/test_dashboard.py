"""The page at `/`."""

from tests.gateway.conftest import Running
from tests.gateway.test_publisher import write_version

ASK = [{"role": "user", "content": "<script>alert(1)</script>"}]


async def page(strop: Running):
    async with strop.http.get(strop.url + "/") as response:
        assert response.status == 200
        return await response.text(), response.headers


async def test_an_empty_page_says_what_to_do(strop: Running):
    text, headers = await page(strop)
    assert f"<code>OPENAI_BASE_URL={strop.url}/v1</code>" in text
    assert "agent" in text
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_versions_show_their_rewards_and_probes(strop: Running):
    for split, value in (("train", 0.25), ("train", 0.75), ("eval", 1.0)):
        reply = await strop.client.chat.completions.create(
            model="agent",
            messages=ASK,
            max_tokens=3,
            extra_headers={"X-Strop-Split": split, "X-Strop-Group": "<b>g</b>"},
        )
        for reward in (0.0, value):  # corrected: the newest counts
            await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": reward})
    strop.vllm.faults.ignore_adapters = True
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    text, _ = await page(strop)
    assert "0.500" in text
    assert "1.000" in text
    assert "&lt;b&gt;g&lt;/b&gt;" in text
    assert "<b>g</b>" not in text
    async with strop.http.get(strop.url + "/policies/agent") as response:
        assert "differ from the trainer" in await response.text()
    _, versions = await strop.get("/v1/policies/agent/versions")
    assert versions["data"][0]["rewards"]["train"]["mean"] == 0.5
    assert versions["data"][0]["rewards"]["eval"]["trajectories"] == 1
