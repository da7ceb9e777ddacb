"""What a gateway in front of production traffic has to survive."""

import asyncio
import resource

import pytest

from gateway.settings import Settings
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import Running, serving

ASK = {"model": "agent", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}


def address(strop: Running) -> tuple[str, int]:
    host, port = strop.url.removeprefix("http://").split(":")
    return host, int(port)


async def answers(strop: Running) -> bool:
    return (await strop.post("/v1/chat/completions", ASK))[0] == 200


async def test_a_body_of_50_mb_is_refused_and_not_kept(strop: Running):
    async with strop.http.post(
        strop.url + "/v1/chat/completions", data=b'{"x": "' + b"y" * 50_000_000 + b'"}'
    ) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"
    assert await answers(strop)


async def test_headers_of_100_kb_harm_nobody(strop: Running):
    reader, writer = await asyncio.open_connection(*address(strop))
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 100_000 + b"\r\n\r\n")
    status = await asyncio.wait_for(reader.readline(), 5)
    assert status.split()[1] in (b"200", b"400", b"431")
    writer.close()
    assert await answers(strop)


async def test_idle_connections_do_not_keep_others_out(strop: Running):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Both ends of each connection are in this process.
    count = min(5000, (min(hard, 20_000) - 500) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    writers = []
    try:
        for _ in range(count):
            _, writer = await asyncio.open_connection(*address(strop))
            writers.append(writer)
        assert await answers(strop)
    finally:
        for writer in writers:
            writer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_request_that_is_cut_off_in_its_body_leaves_nothing(strop: Running):
    _, writer = await asyncio.open_connection(*address(strop))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    await asyncio.sleep(0.1)
    assert strop.vllm.stats["requests"] == 0
    assert await answers(strop)


@pytest.mark.parametrize("fault", [{"error_mid_stream": 3}, {"broken_json": True}])
async def test_rubbish_in_the_middle_of_a_stream_ends_it_with_an_error(strop: Running, fault):
    for name, value in fault.items():
        setattr(strop.vllm.faults, name, value)
    async with strop.http.post(
        strop.url + "/v1/chat/completions", json={**ASK, "stream": True}
    ) as response:
        text = await response.text()
    assert '"error"' in text
    assert "[DONE]" not in text


async def test_shutting_down_finishes_the_streams_that_run(tmp_path, toy_base):
    import aiohttp

    async with FakeVllm() as vllm:
        vllm.faults.slow = 0.05
        settings = Settings(
            data_dir=tmp_path / "strop", replicas=[vllm.url], base_model=str(toy_base)
        )
        async with aiohttp.ClientSession() as http:
            async with serving(settings) as (url, gateway):
                await gateway.publisher.reconcile()
                response = await http.post(
                    url + "/v1/chat/completions", json={**ASK, "stream": True}
                )
                await response.content.readany()
            # `serving` has told uvicorn to stop and waited for it.
            assert (await response.text()).rstrip().endswith("data: [DONE]")
