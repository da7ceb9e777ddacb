"""`strop doctor` finds each mistake that it is made to find, and says what to do."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.commands import doctor_machine, doctor_vllm, findings
from gateway.commands.doctor import examine
from gateway.commands.findings import Answer, Finding
from gateway.settings import Settings
from gateway.store import Database, keys
from tests.fake_vllm import FakeVllm
from tests.gateway.conftest import Running
from tests.gateway.test_publisher import write_version
from tests.toy_vllm import generation


def of(found: list[Finding], level: str) -> list[str]:
    return [f"{one.about}: {one.text} → {one.fix}" for one in found if one.level == level]


async def look(strop: Running, **changes) -> list[Finding]:
    settings = strop.gateway.settings.model_copy(update=changes)
    return await asyncio.to_thread(
        lambda: list(doctor_vllm.replicas(settings, strop.gateway.database, {}))
    )


async def test_nothing_is_wrong_with_what_works(strop: Running, monkeypatch: pytest.MonkeyPatch):
    settings = strop.gateway.settings
    monkeypatch.setenv("STROP_DATA_DIR", str(settings.data_dir))
    monkeypatch.setenv("STROP_BASE_MODEL", settings.base_model)
    monkeypatch.setenv("STROP_REPLICAS", f'["{settings.replicas[0]}"]')
    monkeypatch.setenv("STROP_URL", strop.url)
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    before = dict(strop.vllm.adapters)
    found = await asyncio.to_thread(lambda: list(examine()))
    assert of(found, "error") == []
    assert of(found, "warning") == []
    text = "\n".join(of(found, "ok"))
    for part in (
        "it serves base",
        "token ids and logprobs",
        "distribution that was sampled from",
        "it loads adapters of rank 8",
        "vLLM and trainer agree on agent",
        "is ready",
        "clock agrees",
        "SQLite answers, up to date",
    ):
        assert part in text, part
    # It leaves nothing behind.
    assert strop.vllm.adapters == before
    assert not list(settings.artifacts().glob("strop-doctor-*"))
    result = await asyncio.to_thread(CliRunner().invoke, app, ["doctor"])
    assert result.exit_code == 0
    assert "Nothing is wrong." in result.output


async def test_flags_of_vllm_are_found(strop: Running, monkeypatch: pytest.MonkeyPatch):
    strop.vllm.max_lora_rank = 1
    assert any("--max-lora-rank 8" in line for line in of(await look(strop), "error"))
    strop.vllm.max_lora_rank = 64
    strop.vllm.faults.drop_token_ids = True
    assert any("no token ids" in line for line in of(await look(strop), "error"))
    strop.vllm.faults.drop_token_ids = False
    # As with --logprobs-mode raw_logprobs.
    monkeypatch.setattr(generation, "_processed", lambda logprobs, *_: np.asarray(logprobs))
    assert any("processed_logprobs" in line for line in of(await look(strop), "error"))


async def test_paths_that_vllm_does_not_see_are_found(strop: Running):
    async with FakeVllm() as elsewhere:
        real = elsewhere._load

        async def load(request):
            body = await request.json()
            body["lora_path"] = "/elsewhere" + body["lora_path"]
            request._read_bytes = __import__("json").dumps(body).encode()
            return await real(request)

        elsewhere._load = load  # type: ignore[method-assign]
        await elsewhere.stop()
        await elsewhere.start()
        errors = of(await look(strop, replicas=[elsewhere.url]), "error")
    assert len(errors) == 1
    assert "it does not see" in errors[0]
    assert "STROP_ARTIFACTS_DIR" in errors[0]


async def test_a_vllm_that_is_not_there_or_serves_something_else_is_found(strop: Running):
    errors = of(await look(strop, replicas=["http://127.0.0.1:9"]), "error")
    assert len(errors) == 1
    assert "correct STROP_REPLICAS" in errors[0]
    async with FakeVllm(model="other") as other:
        errors = of(await look(strop, replicas=[other.url]), "error")
    assert "it serves other, and not base" in errors[0]


async def test_runtime_loading_that_is_off_is_found(strop: Running):
    async with FakeVllm() as off:
        off._load = off._tokenize  # type: ignore[method-assign]
        await off.stop()
        app_of = off._app

        def without():
            made = app_of()
            resource = next(
                r for r in made.router.resources() if r.canonical.endswith("/load_lora_adapter")
            )
            made.router._resources.remove(resource)
            made.router._resource_index.pop(resource.canonical, None)
            return made

        off._app = without  # type: ignore[method-assign]
        await off.start()
        errors = of(await look(strop, replicas=[off.url]), "error")
    assert any("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in line for line in errors)


async def test_another_dtype_is_seen_in_the_probes(strop: Running):
    truth = None
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    with strop.gateway.database.write() as connection:
        from sqlalchemy import update

        from gateway.store.models import Version

        connection.execute(
            update(Version)
            .where(Version.number == 1)
            .values(probe_result={"replicas": {"r": {"mean_difference": 0.03}}})
        )
    assert truth is None
    warnings = of(await look(strop), "warning")
    assert len(warnings) == 1
    assert "different dtypes" in warnings[0]


NOBODY = "http://127.0.0.1:9"


async def test_whatever_is_found_comes_with_what_to_do(
    strop: Running, monkeypatch: pytest.MonkeyPatch
):
    """In a room where nearly nothing is as it should be."""
    monkeypatch.setattr(doctor_vllm, "fetch", unwilling)
    found = await look(strop, base_model="no/folder", replicas=[strop.vllm.url, NOBODY])
    settings = Settings(data_dir=strop.gateway.settings.data_dir, host="0.0.0.0", port=9)
    found += doctor_machine.keys_and_address(settings, None)
    found += doctor_machine.gateway(settings, {})
    found += doctor_machine.training(strop.gateway.database)
    assert {"note", "error"} <= {finding.level for finding in found}
    assert "logprobs mode cannot be told" in str(found)
    assert "rank and paths cannot be tried" in str(found)
    assert [finding for finding in found if finding.level != "ok" and not finding.fix] == []


def unwilling(url: str, body: object = None, **options: object) -> Answer:
    """A vLLM that gives no top logprobs."""
    if url.endswith("/v1/completions"):
        return Answer(400, {"error": {"message": "logprobs: 5 is more than the limit of 0"}})
    return findings.fetch(url, body, **options)


def test_clocks_that_disagree_are_found():
    assert findings.clock("x", None) is None
    assert findings.clock("x", time.time() + 2).level == "ok"
    behind = findings.clock("x", time.time() - 3600)
    assert (behind.level, "behind" in behind.text) == ("warning", True)


def test_names_that_nothing_reads_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "strop.toml"
    file.write_text("basemodel = 'x'\nport = 1\n[trainer]\ndevice = 'cpu'\n")
    monkeypatch.setenv("STROP_CONFIG", str(file))
    monkeypatch.setenv("STROP_REPLICA", "[]")
    monkeypatch.setenv("STROP_TRAINER_DEVICE", "cpu")
    monkeypatch.setenv("STROP_VLLM__PORT", "0")
    warnings = of(list(doctor_machine.unknown_settings()), "warning")
    assert len(warnings) == 2
    assert "base_model?" in warnings[0]
    assert "STROP_REPLICA is read by nothing → Did you mean replicas?" in warnings[1]
    file.write_text("port = ")
    assert "cannot be read" in of(list(doctor_machine.unknown_settings()), "error")[0]


def test_a_database_that_is_old_or_away_is_found(tmp_path: Path):
    settings = Settings(data_dir=tmp_path)
    Database(settings.url()).migrate("0003")
    found = [finding for finding, _ in doctor_machine.database(settings)]
    assert "strop migrate" in of(found, "error")[0]
    Database(settings.url()).migrate()
    found = [finding for finding, _ in doctor_machine.database(settings)]
    assert of(found, "error") == []
    away = Settings(database_url="postgresql://u:secret-word@127.0.0.1:9/x")
    found = [finding for finding, _ in doctor_machine.database(away)]
    assert "does not answer" in of(found, "error")[0]
    assert "secret-word" not in str(found)


def test_disks_and_keys_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = Settings(data_dir=tmp_path / "d", host="0.0.0.0")
    (tmp_path / "file").write_text("")
    blocked = Settings(data_dir=tmp_path / "d", artifacts_dir=tmp_path / "file")
    assert "artifacts" in of(list(doctor_machine.disk(blocked)), "error")[0]
    monkeypatch.setattr(doctor_machine, "_FREE_BYTES", 2**62)
    assert len(of(list(doctor_machine.disk(settings)), "warning")) == 2
    database = Database(settings.url())
    database.migrate()
    found = list(doctor_machine.keys_and_address(settings, database))
    assert "strop keys create" in of(found, "error")[0]
    with database.write() as connection:
        key, secret = keys.create(connection, "default", "", ["read"])
    monkeypatch.setenv("STROP_API_KEY", secret)
    found = list(doctor_machine.keys_and_address(settings, database))
    assert of(found, "ok") == ["keys: STROP_API_KEY is valid, for read → None"]
    with database.write() as connection:
        keys.revoke(connection, key.id)
    found = list(doctor_machine.keys_and_address(settings, database))
    assert "was revoked" in of(found, "error")[0]
