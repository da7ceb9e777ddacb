"""Several vLLMs: one that dies, hangs, answers 500, is drained, or comes back elsewhere."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.backends import members
from gateway.backends.asking import ask
from gateway.backends.ejection import Ejection
from gateway.backends.vllm import Replica
from gateway.gateway import Gateway
from gateway.judge.asking import Asker, NotNow
from gateway.settings import Settings
from gateway.store import drains
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import serving


class Fleet:
    """A gateway before several fake vLLMs."""

    def __init__(self, url: str, gateway: Gateway, http: aiohttp.ClientSession):
        self.url, self.gateway, self.http = url, gateway, http

    async def ask(self, number: int = 0, **body: Any) -> tuple[int, str]:
        asked = {"model": "agent", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}
        headers = {"x-strop-trajectory": f"t{number}"}
        async with self.http.post(
            self.url + "/v1/chat/completions", json={**asked, **body}, headers=headers
        ) as response:
            return response.status, await response.text()

    async def listed(self) -> dict[str, Any]:
        async with self.http.get(self.url + "/v1/replicas") as response:
            return {replica["name"]: replica for replica in (await response.json())["data"]}

    async def post(self, path: str) -> tuple[int, Any]:
        async with self.http.post(self.url + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def fleet(
    folder: Path, base: Path, replicas: list[str], **options: Any
) -> AsyncIterator[Fleet]:
    settings = Settings(
        data_dir=folder / "strop",
        replicas=replicas,
        base_model=str(base),
        publish_poll=0.05,
        replica_dns_seconds=0.05,
        **options,
    )
    async with serving(settings) as (url, gateway), aiohttp.ClientSession() as http:
        await gateway.publisher.reconcile()
        yield Fleet(url, gateway, http)


@pytest.fixture
async def two() -> AsyncIterator[list[FakeVllm]]:
    async with FakeVllm() as first, FakeVllm() as second:
        yield [first, second]


def name_of(vllm: FakeVllm) -> str:
    return vllm.url.removeprefix("http://")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within half a minute")


async def test_trajectories_stay_with_their_replica(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        for number in range(8):
            before = [vllm.stats["completed"] for vllm in two]
            for _ in range(3):
                assert (await strop.ask(number))[0] == 200
            gained = [v.stats["completed"] - b for v, b in zip(two, before, strict=True)]
            assert sorted(gained) == [0, 3]
        assert all(vllm.stats["completed"] for vllm in two)
        shown = await strop.listed()
        assert {replica["state"] for replica in shown.values()} == {"serving"}
        assert all(replica["serves"] == ["agent@0"] for replica in shown.values())


async def test_a_replica_that_dies_costs_no_request_and_is_used_again_when_it_is_back(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        await two[0].stop()
        assert {(await strop.ask(number))[0] for number in range(8)} == {200}
        await until(lambda: not strop.gateway.pool.replicas[0].healthy)
        assert (await strop.listed())[name_of(two[0])]["state"] == "unhealthy"
        await two[0].start()
        await until(lambda: len(strop.gateway.pool.serving("agent@0")) == 2)
        before = two[0].stats["completed"]
        for number in range(8):
            assert (await strop.ask(number))[0] == 200
        assert two[0].stats["completed"] > before


async def test_a_replica_that_answers_500_is_ejected_and_comes_back(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
):
    now = [0.0]
    monkeypatch.setattr("gateway.backends.ejection.monotonic", lambda: now[0])
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        two[0].faults.status, two[0].faults.status_times = 500, 10_000
        assert {(await strop.ask(number))[0] for number in range(30)} == {200}
        # Three requests that failed, each repeated on the other one.
        assert two[0].stats["completed"] == 0
        assert 10_000 - two[0].faults.status_times == 3
        shown = (await strop.listed())[name_of(two[0])]
        assert (shown["state"], shown["failures"], shown["healthy"]) == ("ejected", 3, True)
        two[0].faults.status_times = 0
        now[0] += 6.0
        assert {(await strop.ask(number))[0] for number in range(30)} == {200}
        assert two[0].stats["completed"] > 0
        assert (await strop.listed())[name_of(two[0])]["failures"] == 0


async def test_where_all_replicas_fail_the_client_sees_their_error(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        for vllm in two:
            vllm.faults.status, vllm.faults.status_times = 500, 10_000
        for number in range(8):
            status, text = await strop.ask(number)
            assert (status, "told to fail" in text) == (500, True)


async def test_a_replica_that_hangs_is_ejected(tmp_path: Path, toy_base: Path, two: list[FakeVllm]):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two], upstream_timeout=1.0) as strop:
        two[0].faults.slow = 60.0
        assert {(await strop.ask(number))[0] for number in range(20)} == {200}
        # Three requests waited for it, and went to the other one then.
        assert strop.gateway.pool.replicas[0].ejection.failures == 3
        assert two[0].stats["aborted"] == 3


async def test_a_replica_that_breaks_off_in_mid_stream_counts_as_failing(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        two[0].faults.die_mid_stream = 2
        texts = [(await strop.ask(n, stream=True, max_tokens=9))[1] for n in range(20)]
        assert sum("[DONE]" not in text for text in texts) == 3
        assert strop.gateway.pool.replicas[0].ejection.failures == 3


async def test_a_replica_that_lost_its_adapters_is_passed_over(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        two[0].adapters.clear()
        assert {(await strop.ask(number))[0] for number in range(8)} == {200}
        await until(lambda: "agent@0" in two[0].adapters)


async def test_a_drained_replica_ends_what_it_began_and_gets_nothing_new(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        for vllm in two:
            vllm.faults.slow = 0.1
        begun = [asyncio.create_task(strop.ask(number, max_tokens=5)) for number in range(8)]
        await until(lambda: two[0].stats["in_flight"] > 0)
        status, shown = await strop.post(f"/v1/replicas/{name_of(two[0])}/drain")
        assert (status, shown["state"]) == (200, "draining")
        assert {status for status, _ in await asyncio.gather(*begun)} == {200}
        for vllm in two:
            vllm.faults.slow = 0.0
        before = two[0].stats["requests"]
        # The publisher has read the database again, as another gateway would.
        await strop.gateway.publisher.reconcile()
        assert {(await strop.ask(number))[0] for number in range(8)} == {200}
        assert two[0].stats["requests"] == before
        assert (await strop.listed())[name_of(two[0])]["state"] == "drained"
        await strop.post(f"/v1/replicas/{name_of(two[0])}/resume")
        await strop.gateway.publisher.reconcile()
        assert {(await strop.ask(number))[0] for number in range(8)} == {200}
        assert two[0].stats["requests"] > before
        status, shown = await strop.post("/v1/replicas/nobody/drain")
        assert (status, shown["error"]["code"]) == (404, "replica_not_found")


@pytest.mark.parametrize("model", ["agent", "base"])
@pytest.mark.parametrize("fault", ["status", "cut off"])
async def test_requests_that_are_not_logged_count_for_ejection_and_are_repeated(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm], model: str, fault: str
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        failing, other = two
        if fault == "status":
            failing.faults.status, failing.faults.status_times = 500, 10_000
        else:
            failing.faults.die_mid_stream = 0
        asked = {"model": model, "input": "aaa"}
        for _ in range(8):
            async with strop.http.post(strop.url + "/v1/embeddings", json=asked) as response:
                assert response.status == 200, await response.text()
        replicas = {replica.url: replica for replica in strop.gateway.pool.replicas}
        first, second = replicas[failing.url], replicas[other.url]
        assert (first.ejection.failures, first.ejection.now) == (3, True)
        assert (second.ejection.failures, second.ejection.now) == (0, False)
        # One that is drained gets none of them either.
        await strop.post(f"/v1/replicas/{name_of(other)}/drain")
        before = other.stats["requests"]
        async with strop.http.post(strop.url + "/v1/embeddings", json=asked) as response:
            assert response.status == (500 if fault == "status" else 502)
        assert other.stats["requests"] == before


@pytest.mark.parametrize("model", ["agent", "base"])
async def test_embeddings_are_shared_out_by_load(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm], model: str
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:

        async def gained(number: int) -> list[int]:
            before = [vllm.stats["requests"] for vllm in two]
            for n in range(number):
                asked = {"model": model, "input": f"text {n}"}
                async with strop.http.post(strop.url + "/v1/embeddings", json=asked) as response:
                    assert response.status == 200, await response.text()
            return [v.stats["requests"] - b for v, b in zip(two, before, strict=True)]

        # One after the other, they take turns; while one is busy, the other gets them.
        assert await gained(8) == [4, 4]
        strop.gateway.pool.replicas[0].in_flight += 1
        assert await gained(8) == [0, 8]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
async def test_what_is_not_logged_passes_over_a_replica_that_lost_its_version(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm], path: str
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        first, second = strop.gateway.pool.replicas
        pokes: list[str] = []

        def choose(without: Replica | None) -> tuple[Replica, str]:
            return (first, "agent@7") if without is None else (second, "agent@0")

        body = {"input": "x", "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        answered = await ask(path, body, choose, lambda: pokes.append(path))
        assert answered is not None
        assert answered[0] == 200, answered[1]
        # A 404 of other routes may say that the route is not there: only that of a completion is
        # a reason to look after the version.
        assert bool(pokes) is (path == "/v1/chat/completions")


async def test_a_judge_of_our_own_counts_for_ejection_and_is_asked_elsewhere(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm]
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        gateway = strop.gateway
        asker = Asker({}, gateway.publisher, gateway.pool)
        body = {"model": "agent", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}
        own = gateway.pool.choose("agent@0", "judge")
        (failing,) = [vllm for vllm in two if own is not None and vllm.url == own.url]
        failing.faults.status, failing.faults.status_times = 500, 10_000
        for _ in range(8):
            assert (await asker.ask("default", body)).body["choices"]
        assert own is not None
        assert (own.ejection.failures, own.ejection.now) == (3, True)
        for vllm in two:
            vllm.faults.status, vllm.faults.status_times = 500, 10_000
        with pytest.raises(NotNow, match="answered 500"):
            await asker.ask("default", body)


async def test_a_look_at_the_database_that_began_before_a_drain_does_not_undo_it(
    tmp_path: Path, toy_base: Path, two: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
):
    async with fleet(tmp_path, toy_base, [vllm.url for vllm in two]) as strop:
        looked, go_on, read = threading.Event(), threading.Event(), drains.read

        def late(connection: Any) -> frozenset[str]:
            found = read(connection)
            looked.set()
            assert go_on.wait(20)
            return found

        monkeypatch.setattr(drains, "read", late)
        old = asyncio.create_task(strop.gateway.publisher.reconcile())
        assert await asyncio.to_thread(looked.wait, 20)
        drained = await strop.post(f"/v1/replicas/{name_of(two[0])}/drain")
        assert drained[1]["state"] == "drained"
        seen = strop.gateway.pool.drained
        go_on.set()
        monkeypatch.setattr(drains, "read", read)
        await old
        assert strop.gateway.pool.drained == seen == {two[0].url}


async def test_replicas_behind_a_name_come_and_go(
    tmp_path: Path, toy_base: Path, monkeypatch: pytest.MonkeyPatch
):
    behind: list[str] = []

    async def addresses(host: str, port: int) -> list[str]:
        assert (host, port) == ("vllm.test", 8000)
        if not behind:
            raise OSError("no such name")
        return behind

    monkeypatch.setattr(members, "addresses", addresses)
    async with AsyncExitStack() as stack:
        first, second, third = [await stack.enter_async_context(FakeVllm()) for _ in range(3)]
        behind[:] = [name_of(first), name_of(second)]
        name = "dns+http://vllm.test:8000"
        async with fleet(tmp_path, toy_base, [name]) as strop:
            pool = strop.gateway.pool
            await until(lambda: len(pool.serving("agent@0")) == 2)
            first.faults.slow = 0.1
            begun = [asyncio.create_task(strop.ask(n, max_tokens=5)) for n in range(8)]
            await until(lambda: first.stats["in_flight"] > 0)
            # One comes back under another address: it is brought up to date, the old one ends.
            behind[:] = [name_of(second), name_of(third)]
            await until(lambda: {r.url for r in pool.serving("agent@0")} == {second.url, third.url})
            assert {status for status, _ in await asyncio.gather(*begun)} == {200}
            await until(lambda: {r.url for r in pool.replicas} == {second.url, third.url})
            assert {r["source"] for r in (await strop.listed()).values()} == {name}
            # A name server that does not answer takes nothing away.
            behind.clear()
            await asyncio.sleep(0.2)
            assert (await strop.ask())[0] == 200
            assert len(pool.replicas) == 2


async def test_a_name_is_resolved_to_all_of_its_addresses():
    found = await members.Members(["dns+http://localhost:81", "http://x:8000"], 5.0).urls()
    assert "http://127.0.0.1:81" in found
    assert found["http://x:8000"] == "http://x:8000"


def test_a_replica_that_fails_again_is_left_alone_for_longer(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("gateway.backends.ejection.monotonic", lambda: now[0])
    ejection = Ejection()
    for _ in range(2):
        ejection.failed("x")
    assert not ejection.now
    waits = []
    for _ in range(6):
        ejection.failed("x")
        began = now[0]
        while ejection.now:
            now[0] += 1.0
        waits.append(now[0] - began)
    assert waits == [5, 10, 20, 40, 60, 60]
    ejection.succeeded()
    ejection.failed("x")
    assert not ejection.now
