"""`/metrics`: what it counts, whose series it shows, and that the alert rules speak of them."""

import asyncio
import os
import re
import time
from pathlib import Path

import yaml
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from gateway.store import keys, outbox, training
from gateway.store.claims import TrainablePolicy
from gateway.telemetry.siblings import Siblings
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.test_publisher import write_version

ASK = [{"role": "user", "content": "A secret of the user."}]
OBSERVABILITY = Path(__file__).resolve().parents[2] / "examples" / "observability"


async def scrape(strop: Running, **headers: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name → label values, by the order of their names → value."""
    async with strop.http.get(strop.url + "/metrics", headers=headers) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain")
        text = await response.text()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = tuple(sample.labels[name] for name in sorted(sample.labels))
            assert key not in found.setdefault(sample.name, {}), "a series was printed twice"
            found[sample.name][key] = sample.value
    return found


async def ask(strop: Running, **options):
    options = {"model": "agent", "messages": ASK, "max_tokens": 3, **options}
    return await strop.client.chat.completions.create(**options)


async def test_requests_tokens_and_latencies_are_counted(strop: Running):
    reply = await ask(strop)
    stream = await ask(strop, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    await strop.post("/v1/chat/completions", {"model": "nobody", "messages": ASK})
    await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": 0.5})
    await strop.get("/v1/" + "x" * 50)
    found = await scrape(strop)
    requests = found["strop_requests_total"]
    chat = "POST /v1/chat/completions"
    assert requests["default", chat, "200"] == 2
    assert requests["default", chat, "404"] == 1
    assert requests["default", "POST /v1/rewards", "201"] == 1
    assert not any("xxx" in label for key in requests for label in key)
    assert found["strop_completions_total"] == {("agent", "default", "", "complete"): 2}
    sent = reply.usage.prompt_tokens + chunks[-1].usage.prompt_tokens
    assert found["strop_tokens_total"]["prompt", "agent", "default"] == sent
    answered = reply.usage.completion_tokens + chunks[-1].usage.completion_tokens
    assert found["strop_tokens_total"]["completion", "agent", "default"] == answered
    phases = found["strop_completion_phase_seconds_count"]
    for phase in ("receive", "first_token", "generation", "commit", "total"):
        assert phases[phase, "agent", "default"] == 2, phase
    sums = found["strop_completion_phase_seconds_sum"]
    parts = sum(value for (phase, *_), value in sums.items() if phase != "total")
    assert 0 < parts <= sums["total", "agent", "default"]
    assert found["strop_commit_seconds_count"][()] >= 3
    assert found["strop_commit_queue"][()] == 0
    assert found["strop_writes_total"][()] >= 3


async def test_a_path_under_rollouts_is_the_same_route(strop: Running):
    body = {"model": "agent", "messages": ASK, "max_tokens": 3}
    for number in range(3):
        await strop.post(f"/rollouts/g/t{number}/v1/chat/completions", body)
    await strop.get("/v1/policies/agent/versions")
    requests = (await scrape(strop))["strop_requests_total"]
    assert requests["default", "POST /v1/chat/completions", "200"] == 3
    assert requests["default", "GET /v1/policies/{name}/versions", "200"] == 1


async def test_what_replicas_serve_and_what_failed_its_probe_is_shown(strop: Running):
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    strop.vllm.faults.ignore_adapters = True
    write_version(strop, 2, parent=1)
    await strop.gateway.publisher.reconcile()
    found = await scrape(strop)
    url = strop.gateway.pool.replicas[0].url
    assert found["strop_replica_up"] == {(url,): 1}
    assert found["strop_replica_serves"]["agent", "default", url, "1"] == 1
    assert found["strop_replica_missing_alias"] == {("agent", "default", url): 0}
    assert found["strop_policy_alias"] == {("agent", "default"): 1}
    assert found["strop_events_total"]["failed", "agent", "default"] == 1
    assert found["strop_last_event_timestamp_seconds"]["published", "agent", "default"] > 1e9
    assert found["strop_versions"]["agent", "default", "failed"] == 1
    await strop.vllm.stop()
    await strop.gateway.publisher.reconcile()
    found = await scrape(strop)
    assert found["strop_replica_up"] == {(url,): 0}
    assert found["strop_replica_missing_alias"] == {("agent", "default", url): 1}


async def test_groups_steps_and_rewards_are_counted(strop: Running):
    for number in range(6):
        headers = {"X-Strop-Group": f"g{number // 4}", "X-Strop-Trajectory": f"t{number}"}
        reply = await ask(strop, extra_headers=headers)
        if number != 5:
            await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": number / 4})
    policy = TrainablePolicy("default", "agent", "base", 0, None, {}, {})
    step = training.begin_step(strop.gateway.database, policy, "w", {})
    training.fail_step(strop.gateway.database, policy, step, "w", [], "out of memory")
    found = await scrape(strop)
    assert found["strop_groups"]["agent", "default", "", "ready"] == 1
    assert found["strop_groups"]["agent", "default", "", "open"] == 1
    assert found["strop_trajectories"]["agent", "default", "", "train", "open"] == 6
    assert found["strop_steps_total"]["agent", "default", "failed"] == 1
    assert found["strop_reward_mean"]["agent", "default", "train", "0"] == 0.5
    assert found["strop_reward_trajectories"]["agent", "default", "train", "0"] == 5
    assert found["strop_oldest_ready_group_timestamp_seconds"]["agent", "default"] > 1e9


async def test_a_key_sees_its_own_project_and_the_process(make_strop: MakeStrop):
    async with make_strop(admin_key="the operator's") as strop:
        secrets = {}
        for project, scope in (("ours", "read"), ("theirs", "admin"), ("mine", "reward")):
            with strop.gateway.database.write() as connection:
                secrets[project] = keys.create(connection, project, "", [scope])[1]
        theirs = {"authorization": f"Bearer {secrets['theirs']}"}
        await strop.post("/v1/policies", {"name": "hidden-name"}, **theirs)
        await strop.post(
            "/v1/chat/completions", {"model": "hidden-name", "messages": ASK}, **theirs
        )
        async with strop.http.get(strop.url + "/metrics") as response:
            assert response.status == 401
        async with strop.http.get(
            strop.url + "/metrics", headers={"x-api-key": secrets["mine"]}
        ) as response:
            assert response.status == 403
        found = await scrape(strop, authorization=f"Bearer {secrets['ours']}")
        assert "strop_commit_queue" in found
        assert not any("hidden-name" in key for family in found.values() for key in family)
        found = await scrape(strop, **theirs)
        assert found["strop_completions_total"] == {("hidden-name", "theirs", "", "complete"): 1}
        found = await scrape(strop, authorization="Bearer the operator's")
        assert ("agent", "default") in found["strop_policy_alias"]
        assert ("hidden-name", "theirs") in found["strop_policy_alias"]


async def test_every_metric_that_a_rule_or_a_panel_names_is_printed(strop: Running):
    reply = await ask(strop)
    await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": 0.5})
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    with strop.gateway.database.write() as connection:
        outbox.add(connection, "completion", [("default", reply.id)], time.time())
    async with strop.http.get(strop.url + "/metrics") as response:
        text = await response.text()
    families = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    known = families | {f"{name}_{end}" for name in families for end in ("bucket", "sum", "count")}
    # Printed with PostgreSQL, and with webhooks, only.
    known |= {"strop_journal_entries", "strop_journal_oldest_seconds", "strop_journal_rejected"}
    known |= {"strop_webhook_attempts"}
    named = set()
    for name in ("alerts.yml", "grafana-dashboard.json"):
        named |= set(re.findall(r"strop_\w+", (OBSERVABILITY / name).read_text()))
    assert len(named) > 15
    assert named <= known, named - known


def test_the_alert_rules_are_whole():
    rules = [
        rule
        for group in yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    names = {rule["alert"] for rule in rules}
    assert {"StropNoStep", "StropProbeFailed", "StropRolledBack", "StropServedNotWanted"} <= names
    for rule in rules:
        assert rule["expr"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


async def test_what_has_not_reached_langfuse_is_shown(strop: Running):
    with strop.gateway.database.write() as connection:
        outbox.add(connection, "completion", [("default", "a"), ("theirs", "b")], time.time() - 60)
    found = await scrape(strop)
    assert found["strop_langfuse_waiting"] == {("default",): 1, ("theirs",): 1}
    assert 60 <= found["strop_langfuse_lag_seconds"][("default",)] < 600
    assert found["strop_langfuse_refused"][("default",)] == 0


async def test_the_process_that_is_asked_speaks_for_all(tmp_path: Path):
    def counts(requests: float, up: float) -> list[Metric]:
        total = CounterMetricFamily("strop_requests", "", labels=("status",))
        total.add_metric(("200",), requests)
        commits = HistogramMetricFamily("strop_commit_seconds", "")
        commits.add_metric((), [("1.0", requests), ("+Inf", requests + 1)], requests)
        replica = GaugeMetricFamily("strop_replica_up", "", labels=("replica",))
        replica.add_metric(("r",), up)
        return [total, commits, replica]

    folder = tmp_path / "metrics"
    folder.mkdir()
    ours = Siblings(tmp_path, lambda: counts(2, 1))
    # Of an earlier start, whose number the parent of this one may well have.
    for earlier in ("0.1-2.json", f"{os.getppid()}.1-2.json", f"{os.getppid()}-2.json"):
        (folder / earlier).write_text("[]")
    task = asyncio.create_task(ours.run())
    async with asyncio.timeout(20):
        while not ours._file.exists():
            await asyncio.sleep(0.01)
    task.cancel()
    assert [file.name for file in folder.iterdir()] == [ours._file.name]
    other = Siblings(tmp_path, list)
    other._file = ours._file.with_name(ours._file.name.replace(".json", "0.json"))
    families = counts(5, 0)
    families[0].add_metric(("404",), 3)
    other.add(families)
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["strop_requests_total", "200"] == 7
    assert values["strop_requests_total", "404"] == 3
    assert values["strop_commit_seconds_bucket", "+Inf"] == 9
    assert values["strop_commit_seconds_sum",] == 7
    assert values["strop_replica_up", "r"] == 0
