"""What replicas serve is made equal to what the database says they should."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from openai import NotFoundError
from safetensors.numpy import load_file, save_file
from sqlalchemy import update

from gateway import adapters, app
from gateway.api.policies import OtherBaseModel
from gateway.settings import Settings
from gateway.store import claims, policies, queries, training
from gateway.store.models import Version
from gateway.store.policy_settings import Lora
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.publishing import add_version
from tests.toy_vllm.model import toy_logprobs

ASK = [{"role": "user", "content": "Who are you?"}]
PROBE = list(range(10, 40))


def write_version(
    strop: Running, number: int, *, parent: int = 0, probe: bool = True, **wrong
) -> Path:
    """What the trainer leaves: a folder, and a row that says `ready`."""
    artifacts = strop.gateway.settings.artifacts() / "default" / "agent"
    folder = artifacts / f"{number:06d}-test"
    shutil.copytree(artifacts / "000000", folder)
    rng = np.random.default_rng(number)
    tensors = load_file(folder / adapters.WEIGHTS)
    changed = {name: rng.normal(size=t.shape).astype(np.float32) for name, t in tensors.items()}
    changed.update(wrong.get("tensors", {}))
    save_file(changed, folder / adapters.WEIGHTS)
    truth = wrong.get("truth", toy_logprobs(folder, PROBE))
    before = wrong.get("before", toy_logprobs(artifacts / "000000", PROBE))
    known = {"token_ids": PROBE, "logprobs": truth, "previous_logprobs": before}
    add_version(strop.gateway, "agent", number, folder, known if probe else None, parent)
    return folder


def version(strop: Running, number: int):
    with strop.gateway.database.read() as connection:
        return queries.version(connection, "default", "agent", number)


def policy(strop: Running):
    with strop.gateway.database.read() as connection:
        return queries.policy(connection, "default", "agent")


async def served(strop: Running, **options) -> str:
    reply = await strop.client.chat.completions.create(
        model="agent", messages=ASK, max_tokens=3, **options
    )
    return reply.model


async def test_a_new_version_is_proven_and_then_served(strop: Running):
    assert await served(strop) == "agent@0"
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    assert await served(strop) == "agent@1"
    row = version(strop, 1)
    assert row["state"] == "serving"
    numbers = row["probe_result"]["replicas"][strop.vllm.url]
    assert numbers["mean_difference"] < 1e-4 < numbers["mean_difference_to_previous"]
    models = [model.id for model in (await strop.client.models.list()).data]
    assert models == ["agent", "agent@0", "agent@1"]


async def test_a_version_that_the_replica_does_not_answer_with_is_failed(strop: Running):
    strop.vllm.faults.ignore_adapters = True
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    row = version(strop, 1)
    assert row["state"] == "failed"
    assert "differ from the trainer's" in row["probe_result"]["error"]
    assert row["probe_result"]["mean_difference"] > 0.05
    assert (policy(strop)["alias"], policy(strop)["head"]) == (0, 0)
    assert await served(strop) == "agent@0"
    status, body = await strop.get("/readyz")
    assert status == 200
    assert "agent@1" in body["failed_versions"]


async def test_a_version_that_equals_the_one_before_is_failed(strop: Running):
    folder = strop.gateway.settings.artifacts() / "default" / "agent" / "000000"
    same = toy_logprobs(folder, PROBE)
    zero = load_file(folder / adapters.WEIGHTS)
    write_version(strop, 1, tensors=zero, truth=same, before=same)
    await strop.gateway.publisher.reconcile()
    assert "cannot be told apart" in version(strop, 1)["probe_result"]["error"]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {
                "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.full(
                    (8, 8), np.nan, np.float32
                )
            },
            "not finite",
        ),
        (
            {
                "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": np.ones(
                    (8, 4), np.float32
                )
            },
            "has shape",
        ),
        (
            {
                "base_model.model.model.layers.9.mlp.up_proj.lora_B.weight": np.ones(
                    (8, 8), np.float32
                )
            },
            "fits no layer",
        ),
    ],
)
async def test_a_broken_adapter_never_reaches_vllm(strop: Running, tensors, words):
    write_version(strop, 1, tensors=tensors)
    await strop.gateway.publisher.reconcile()
    assert words in version(strop, 1)["probe_result"]["error"]
    assert "agent@1" not in strop.vllm.adapters


async def test_an_adapter_with_layers_missing_or_another_rank_is_refused(strop: Running):
    folder = strop.gateway.settings.artifacts() / "default" / "agent" / "000000"
    base = Path(strop.gateway.settings.base_model)
    adapters.check(folder, Lora(), base)
    with pytest.raises(adapters.BrokenAdapter, match="rank is 8"):
        adapters.check(folder, Lora(rank=16), base)
    tensors = load_file(folder / adapters.WEIGHTS)
    tensors.popitem()
    save_file(tensors, folder / adapters.WEIGHTS)
    with pytest.raises(adapters.BrokenAdapter, match="missing"):
        adapters.check(folder, Lora(), base)
    (folder / adapters.CONFIG).write_text(json.dumps({"r": 8, "use_dora": True}))
    with pytest.raises(adapters.BrokenAdapter, match="DoRA"):
        adapters.check(folder, Lora(), base)


async def test_a_trajectory_keeps_the_version_it_began_with(strop: Running):
    header = {"X-Strop-Trajectory": "long-one"}
    assert await served(strop, extra_headers=header) == "agent@0"
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    assert await served(strop, extra_headers=header) == "agent@0"
    # Known from the store as well, after a restart.
    strop.gateway.placements.__init__(strop.gateway.database)
    assert await served(strop, extra_headers=header) == "agent@0"
    assert await served(strop) == "agent@1"


async def test_a_replica_that_restarts_is_brought_up_to_date(strop: Running):
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    port = int(strop.vllm.url.rsplit(":", 1)[1])
    await strop.vllm.stop()
    await strop.gateway.publisher.reconcile()
    assert not strop.gateway.pool.healthy
    async with FakeVllm(port=port) as fresh:
        await strop.gateway.publisher.reconcile()
        assert set(fresh.adapters) == {"agent@0", "agent@1"}
        assert await served(strop) == "agent@1"


async def test_every_replica_must_pass(make_strop: MakeStrop, tmp_path: Path):
    async with make_strop() as strop, FakeVllm() as second:
        strop.gateway.pool._members.fixed.append(second.url)
        await strop.gateway.publisher.reconcile()
        second.faults.ignore_adapters = True
        write_version(strop, 1)
        await strop.gateway.publisher.reconcile()
        assert version(strop, 1)["state"] == "failed"
        assert await served(strop) == "agent@0"
        second.faults.ignore_adapters = False
        write_version(strop, 2)
        await strop.gateway.publisher.reconcile()
        assert set(version(strop, 2)["probe_result"]["replicas"]) == {strop.vllm.url, second.url}


async def test_old_versions_are_unloaded_and_their_files_stay(make_strop: MakeStrop, monkeypatch):
    monkeypatch.setattr("gateway.publisher._UNLOAD_AFTER", 0.0)
    async with make_strop(keep_loaded=1) as strop:
        folders = []
        for number in (1, 2, 3):
            folders.append(write_version(strop, number, parent=number - 1))
            await strop.gateway.publisher.reconcile()
        await strop.gateway.publisher.reconcile()
        assert set(strop.vllm.adapters) == {"agent@2", "agent@3"}
        assert version(strop, 1)["state"] == "retired"
        assert all(folder.exists() for folder in folders)
        with pytest.raises(NotFoundError):
            await strop.client.chat.completions.create(model="agent@1", messages=ASK)
        status, body = await strop.post("/v1/policies/agent/rollback", {"version": 1})
        assert (status, body["alias"], body["head"]) == (200, 1, 1)
        assert await served(strop) == "agent@1"


async def test_a_rollback_is_served_at_once(strop: Running):
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    status, body = await strop.post("/v1/policies/agent/rollback", {"version": 0})
    assert (status, body["alias"], body["head"]) == (200, 0, 0)
    assert await served(strop) == "agent@0"
    (trained,) = claims.trainable_policies(strop.gateway.database)
    assert trained.head == 0
    assert training.next_version(strop.gateway.database, trained) == 2


async def test_a_rollback_supersedes_what_waits_for_its_probe(strop: Running):
    async with strop.gateway.publisher._turn:
        write_version(strop, 1)
        with strop.gateway.database.write() as connection:
            policies.rolled_back(connection, "default", "agent", 0)
            assert not policies.published(connection, "default", "agent", 1, {})
    await strop.gateway.publisher.reconcile()
    assert version(strop, 1)["state"] == "superseded"
    assert policy(strop)["alias"] == 0


async def test_a_rollback_to_what_was_never_served_is_refused(strop: Running):
    assert (await strop.post("/v1/policies/agent/rollback", {"version": 7}))[0] == 404
    assert (await strop.post("/v1/policies/nobody/rollback", {"version": 0}))[0] == 404
    strop.vllm.faults.ignore_adapters = True
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    status, body = await strop.post("/v1/policies/agent/rollback", {"version": 1})
    assert (status, body["error"]["code"]) == (409, "version_not_served")


async def test_policies_are_created_over_the_api(strop: Running):
    body = {"name": "mailer", "settings": {"group_size": 3}, "lora": {"rank": 8}}
    status, created = await strop.post("/v1/policies", body)
    assert (status, created["alias"], created["loaded"]) == (201, 0, [0])
    assert created["settings"]["group_size"] == 3
    assert (await strop.post("/v1/policies", body))[0] == 409
    for wrong in ({"name": "no spaces please"}, {"name": "x", "settings": {"grup_size": 3}}, {}):
        assert (await strop.post("/v1/policies", wrong))[0] == 422
    wrong = {"name": "x", "lora": {"target_modules": ["nothing_proj"]}}
    status, answer = await strop.post("/v1/policies", wrong)
    assert status == 400
    assert "nothing_proj" in answer["error"]["message"]
    reply = await strop.client.chat.completions.create(model="mailer", messages=ASK, max_tokens=3)
    assert reply.model == "mailer@0"
    assert [p["name"] for p in (await strop.get("/v1/policies"))[1]["data"]] == ["agent", "mailer"]


async def test_a_policy_is_not_served_on_another_base_model(tmp_path: Path, toy_base: Path):
    async with app.running(Settings(data_dir=tmp_path, base_model=str(toy_base))):
        pass
    other = tmp_path / "other"
    shutil.copytree(toy_base, other)
    with pytest.raises(OtherBaseModel, match="was made for the base model"):
        async with app.running(Settings(data_dir=tmp_path, base_model=str(other))):
            pass


async def test_a_replica_with_too_small_a_rank_makes_versions_wait_and_says_so(
    make_strop: MakeStrop,
):
    async with make_strop() as strop:
        strop.vllm.max_lora_rank = 4
        write_version(strop, 1)
        await strop.gateway.publisher.reconcile()
        # The version is not to blame: nothing is lost.
        assert version(strop, 1)["state"] == "ready"
        assert (policy(strop)["alias"], policy(strop)["head"]) == (0, 1)
        _, body = await strop.get("/readyz")
        assert any("--max-lora-rank 8 or more" in warning for warning in body["warnings"])
        strop.vllm.max_lora_rank = 8
        await strop.gateway.publisher.reconcile()
        assert version(strop, 1)["state"] == "serving"
        assert (await strop.get("/readyz"))[1]["warnings"] == []


async def test_a_policy_that_no_replica_can_serve_leaves_the_others_in_rotation(
    make_strop: MakeStrop,
):
    async with make_strop() as strop:
        made, _ = await strop.post("/v1/policies", {"name": "wide", "lora": {"rank": 256}})
        assert made == 201
        await strop.gateway.publisher.reconcile()
        status, body = await strop.get("/readyz")
        assert (status, body["ready"], body["problems"]) == (200, True, [])
        assert any("wide@0" in warning and "rank" in warning for warning in body["warnings"])
        assert body["policies"]["wide"]["loaded"] == []
        assert await served(strop) == "agent@0"
        # Where nothing at all is served, it is a problem.
        strop.vllm.max_lora_rank = 1
        for replica in strop.gateway.pool.replicas:
            replica.lost("it was started anew")
        strop.vllm.adapters.clear()
        await strop.gateway.publisher.reconcile()
        status, body = await strop.get("/readyz")
        assert (status, len(body["problems"])) == (503, 2)


async def test_a_replica_with_another_base_model_makes_versions_wait_and_says_so(strop: Running):
    # What the trainer measured for the version before is far from what this replica gives for it.
    far = [logprob - 1.0 for logprob in toy_logprobs(write_version(strop, 1), PROBE)]
    with strop.gateway.database.write() as connection:
        probe = {"token_ids": PROBE, "logprobs": far, "previous_logprobs": far[::-1]}
        connection.execute(update(Version).where(Version.number == 1).values(probe=probe))
    await strop.gateway.publisher.reconcile()
    assert version(strop, 1)["state"] == "ready"
    _, body = await strop.get("/readyz")
    assert any("not the one that was trained on" in warning for warning in body["warnings"])


async def test_a_base_model_whose_files_were_replaced_is_refused(tmp_path: Path, toy_base: Path):
    base = tmp_path / "another"
    shutil.copytree(toy_base, base)
    async with app.running(Settings(data_dir=tmp_path, base_model=str(base))):
        pass
    weights = next(base.glob("*.safetensors"))
    tensors = load_file(weights)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, weights)
    with pytest.raises(OtherBaseModel, match="are not those that the policy"):
        async with app.running(Settings(data_dir=tmp_path, base_model=str(base))):
            pass
