"""The `strop` command, against a running gateway."""

import asyncio
import json

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from tests.gateway.conftest import Running
from tests.gateway.test_publisher import write_version

ASK = [{"role": "user", "content": "Hello."}]


async def strop_command(strop: Running, *arguments: str):
    env = {"STROP_URL": strop.url, "COLUMNS": "200"}
    return await asyncio.to_thread(CliRunner(env=env).invoke, app, list(arguments))


async def test_status_says_whether_it_is_ready(strop: Running):
    result = await strop_command(strop, "status")
    assert result.exit_code == 0
    assert "ready" in result.output
    assert "agent@0" in result.output
    await strop.vllm.stop()
    await strop.gateway.publisher.reconcile()
    result = await strop_command(strop, "status")
    assert "not ready" in result.output
    assert "no vLLM replica answers" in result.output


async def test_policies_are_listed_shown_and_rolled_back(strop: Running):
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    strop.vllm.faults.ignore_adapters = True
    write_version(strop, 2, parent=1)
    await strop.gateway.publisher.reconcile()
    assert "agent" in (await strop_command(strop, "policy", "list")).output
    shown = (await strop_command(strop, "policy", "show", "agent")).output
    assert "from the trainer's" in shown
    assert "failed" in shown
    assert "differ from the trainer's" in shown
    shown = json.loads((await strop_command(strop, "policy", "show", "agent", "--json")).output)
    assert [version["state"] for version in shown["versions"]] == ["serving", "serving", "failed"]
    result = await strop_command(strop, "policy", "rollback", "agent", "0")
    assert result.exit_code == 0
    assert "serves @0" in result.output


async def test_a_reward_is_posted(strop: Running):
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=3)
    result = await strop_command(strop, "reward", reply.id, "0.5")
    assert result.exit_code == 0
    _, body = await strop.get(f"/v1/rewards?completion_id={reply.id}")
    assert [reward["reward"] for reward in body["data"]] == [0.5]


async def test_errors_say_what_to_do_next(strop: Running):
    result = await strop_command(strop, "policy", "show", "nobody")
    assert result.exit_code == 1
    assert "/v1/policies lists them" in result.output
    result = CliRunner(env={"STROP_URL": "http://127.0.0.1:9"}).invoke(app, ["status"])
    assert result.exit_code == 1
    assert "strop up" in result.output


@pytest.mark.parametrize("name", ["STROP_PORT", "STROP_MAX_BODY_BYTES"])
def test_a_wrong_setting_is_named(name):
    result = CliRunner(env={name: "many"}).invoke(app, ["serve"])
    assert result.exit_code == 2
    assert name.removeprefix("STROP_").lower() in result.output


def test_settings_that_cannot_work_are_refused_in_words(tmp_path):
    result = CliRunner(env={"STROP_BASE_MODEL": str(tmp_path)}).invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "is not a model folder" in " ".join(result.output.split())
    (tmp_path / "strop.toml").write_text(
        "[vllm]\nmax_lora_rank = 8\n[policies.big.lora]\nrank = 16\n"
    )
    env = {"STROP_CONFIG": str(tmp_path / "strop.toml")}
    result = CliRunner(env=env).invoke(app, ["serve"])
    assert result.exit_code == 2
    assert "has LoRA rank 16" in " ".join(result.output.split())
