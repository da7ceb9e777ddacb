"""Forking, pausing and resuming, over the API and by command."""

import json
from pathlib import Path

from sqlalchemy import update

from gateway.store import claims
from gateway.store.models import Version
from tests.gateway.conftest import Running
from tests.gateway.test_cli import strop_command
from tests.gateway.test_publisher import ASK, write_version


async def test_a_fork_is_a_policy_of_its_own_that_starts_from_the_version(strop: Running):
    folder = write_version(strop, 1)
    (folder / "state").mkdir()
    (folder / "state" / "training.pt").write_bytes(b"moments")
    await strop.gateway.publisher.reconcile()
    body = {"version": 1, "name": "agent-b"}
    status, made = await strop.post("/v1/policies/agent/fork", body)
    assert (status, made["forked_from"], made["alias"], made["loaded"]) == (201, "agent@1", 0, [0])
    reply = await strop.client.chat.completions.create(model="agent-b", messages=ASK, max_tokens=3)
    assert reply.model == "agent-b@0"
    forked = next(
        p for p in claims.trainable_policies(strop.gateway.database) if p.name == "agent-b"
    )
    copied = Path(forked.head_path)
    assert copied != folder
    for name in ("adapter_model.safetensors", "state/training.pt"):
        assert (copied / name).read_bytes() == (folder / name).read_bytes()
    assert (await strop.post("/v1/policies/agent/fork", body))[0] == 409
    assert (await strop.post("/v1/policies/agent/fork", {**body, "version": 9}))[0] == 404
    assert (await strop.post("/v1/policies/nobody/fork", body))[0] == 404
    assert (await strop.post("/v1/policies/agent/fork", {**body, "name": "a b"}))[0] == 422


async def test_what_is_deleted_is_neither_forked_nor_gone_back_to(strop: Running):
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    with strop.gateway.database.write() as connection:
        connection.execute(update(Version).where(Version.number == 0).values(deleted_at=1.0))
    for path, body in (("fork", {"version": 0, "name": "b"}), ("rollback", {"version": 0})):
        status, answer = await strop.post(f"/v1/policies/agent/{path}", body)
        assert (status, answer["error"]["code"]) == (409, "version_deleted")


async def test_a_paused_policy_is_served_and_not_trained(strop: Running):
    status, paused = await strop.post("/v1/policies/agent/pause", {"reason": "new rewards first"})
    assert (status, paused["state"], paused["state_reason"]) == (200, "paused", "new rewards first")
    assert claims.trainable_policies(strop.gateway.database) == []
    reply = await strop.client.chat.completions.create(model="agent", messages=ASK, max_tokens=3)
    assert reply.model == "agent@0"
    status, resumed = await strop.post("/v1/policies/agent/resume", {"rate_factor": 0.25})
    assert (resumed["state"], resumed["state_reason"]) == ("active", None)
    (trained,) = claims.trainable_policies(strop.gateway.database)
    assert trained.rate_factor == 0.25


async def test_the_commands_do_the_same(strop: Running):
    write_version(strop, 1)
    await strop.gateway.publisher.reconcile()
    said = await strop_command(strop, "policy", "fork", "agent", "1", "other")
    assert "other@0 is agent@1" in said.output
    await strop_command(strop, "policy", "pause", "other", "--reason", "for the audit")
    shown = await strop_command(strop, "policy", "show", "other")
    assert "It is paused: for the audit" in shown.output
    said = await strop_command(strop, "policy", "resume", "other")
    assert "trained, from @0" in said.output
    listed = await strop_command(strop, "policy", "events", "other", "--json")
    kinds = [event["kind"] for event in json.loads(listed.output)["data"]]
    assert kinds == ["resumed", "paused", "forked"]
    assert "for the audit" in (await strop_command(strop, "policy", "events", "other")).output
    said = await strop_command(strop, "policy", "promote", "agent")
    assert said.exit_code == 1
    assert "No version of agent is on trial" in said.output
