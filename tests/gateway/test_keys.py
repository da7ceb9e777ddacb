"""Keys, scopes, and projects that see nothing of each other."""

from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.auth import needed_scope
from gateway.cli import app
from gateway.store import keys
from gateway.store.ids import new_id
from tests.gateway.conftest import MakeStrop, Running

ASK = {"model": "agent", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def make_key(strop: Running, project: str, *scopes: str) -> dict[str, str]:
    with strop.gateway.database.write() as connection:
        _, secret = keys.create(connection, project, "test", scopes or keys.SCOPES)
    return {"authorization": f"Bearer {secret}"}


async def send(strop: Running, method: str, path: str, key: dict[str, str], body: Any = None):
    async with strop.http.request(method, strop.url + path, json=body, headers=key) as response:
        return response.status, await response.json()


async def test_without_keys_this_machine_may_do_everything(strop: Running):
    assert (await strop.post("/v1/chat/completions", ASK))[0] == 200


async def test_once_there_is_a_key_one_is_needed(strop: Running):
    key = make_key(strop, "default")
    strop.gateway.project  # noqa: B018 (the gateway itself is the default project's)
    status, body = await send(strop, "POST", "/v1/chat/completions", {}, ASK)
    assert (status, body["error"]["code"]) == (401, "missing_api_key")
    wrong = {"authorization": "Bearer sk-strop-guess"}
    status, body = await send(strop, "POST", "/v1/chat/completions", wrong, ASK)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert (await send(strop, "POST", "/v1/chat/completions", key, ASK))[0] == 200
    as_anthropic = {"x-api-key": key["authorization"].removeprefix("Bearer ")}
    assert (await send(strop, "GET", "/v1/models", as_anthropic))[0] == 200
    assert (await send(strop, "GET", "/healthz", {}))[0] == 200
    status, body = await send(strop, "POST", "/v1/messages", {}, {})
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")


async def test_a_reward_key_can_only_post_rewards(strop: Running):
    full, reward = make_key(strop, "default"), make_key(strop, "default", "reward")
    _, reply = await send(strop, "POST", "/v1/chat/completions", full, ASK)
    posted = {"completion_id": reply["id"], "reward": 1.0}
    assert (await send(strop, "POST", "/v1/rewards", reward, posted))[0] == 201
    for method, path, body in (
        ("POST", "/v1/chat/completions", ASK),
        ("GET", f"/v1/chat/completions/{reply['id']}", None),
        ("GET", "/v1/groups", None),
        ("GET", "/", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/policies", {"name": "x"}),
        ("POST", "/v1/policies/agent/rollback", {"version": 0}),
        ("DELETE", f"/v1/chat/completions/{reply['id']}", None),
    ):
        status, answer = await send(strop, method, path, reward, body)
        assert (status, answer["error"]["code"]) == (403, "insufficient_scope"), path


async def test_projects_see_nothing_of_each_other(strop: Running):
    ours, theirs = make_key(strop, "ours"), make_key(strop, "theirs")
    for key in (ours, theirs):
        assert (await send(strop, "POST", "/v1/policies", key, {"name": "agent"}))[0] == 201
    headers = {**ours, "X-Strop-Trajectory": "same-name", "X-Strop-Group": "same-group"}
    status, reply = await send(strop, "POST", "/v1/chat/completions", headers, ASK)
    assert (status, reply["model"]) == (200, "agent@0")
    completion = reply["id"]
    for method, path, body in (
        ("GET", f"/v1/chat/completions/{completion}", None),
        ("GET", "/v1/trajectories/same-name", None),
        ("GET", f"/v1/rewards?completion_id={completion}", None),
        ("GET", "/v1/rewards?trajectory_id=same-name", None),
        ("POST", "/v1/rewards", {"completion_id": completion, "reward": 1.0}),
        ("POST", "/v1/rewards", {"trajectory_id": "same-name", "reward": 1.0}),
        ("POST", "/v1/groups/same-group/close", None),
    ):
        status, _ = await send(strop, method, path, theirs, body)
        assert status == 404, path
        if not path.endswith("close"):
            assert (await send(strop, method, path, ours, body))[0] in (200, 201), path
    assert (await send(strop, "GET", "/v1/groups", theirs))[1]["data"] == []
    _, policies = await send(strop, "GET", "/v1/policies", theirs)
    assert len(policies["data"]) == 1
    # The same names in both are two things.
    again = {**theirs, "X-Strop-Trajectory": "same-name", "X-Strop-Group": "same-group"}
    _, reply = await send(strop, "POST", "/v1/chat/completions", again, ASK)
    _, found = await send(strop, "GET", "/v1/trajectories/same-name", theirs)
    assert [turn["id"] for turn in found["completions"]] == [reply["id"]]
    assert set(strop.vllm.adapters) == {"agent@0", "ours/agent@0", "theirs/agent@0"}


async def test_a_conversation_is_not_continued_across_projects(strop: Running):
    ours, theirs = make_key(strop, "ours"), make_key(strop, "theirs")
    for key in (ours, theirs):
        await send(strop, "POST", "/v1/policies", key, {"name": "agent"})
    _, first = await send(strop, "POST", "/v1/chat/completions", ours, ASK)
    echo = first["choices"][0]["message"]
    messages = [*ASK["messages"], echo, {"role": "user", "content": "and?"}]
    _, second = await send(
        strop, "POST", "/v1/chat/completions", theirs, {**ASK, "messages": messages}
    )
    _, stored = await send(strop, "GET", f"/v1/chat/completions/{second['id']}", theirs)
    assert stored["strop"]["parent_id"] is None


async def test_the_admin_key_of_the_settings_works_before_any_other(make_strop: MakeStrop):
    secret = new_id("secret-")
    async with make_strop(admin_key=secret) as strop:
        assert (await strop.get("/v1/policies"))[0] == 401
        key = {"authorization": f"Bearer {secret}"}
        assert (await send(strop, "GET", "/v1/policies", key))[0] == 200
        assert secret not in repr(strop.gateway.settings)


def test_a_revoked_key_is_no_key(strop_database):
    with strop_database.write() as connection:
        key, secret = keys.create(connection, "p", "n", ["read"])
        assert keys.find(connection, keys.digest(secret)) == key
        assert keys.revoke(connection, key.id)
        assert not keys.revoke(connection, key.id)
        assert keys.find(connection, keys.digest(secret)) is None


@pytest.fixture
def strop_database(tmp_path):
    from gateway.store import Database

    database = Database(f"sqlite:///{tmp_path / 'keys.db'}")
    database.migrate()
    yield database
    database.dispose()


def test_whatever_is_not_listed_needs_admin():
    assert needed_scope("POST", "/v1/anything/new") == "admin"
    assert needed_scope("DELETE", "/v1/trajectories/t") == "admin"
    assert needed_scope("GET", "/v1/trajectories/t") == "read"
    assert needed_scope("POST", "/rollouts/g/t/v1/chat/completions") == "inference"
    assert needed_scope("POST", "/v1/rewards/../policies") == "admin"


def test_keys_are_made_listed_and_revoked_on_the_command_line(tmp_path):
    runner = CliRunner(env={"STROP_DATA_DIR": str(tmp_path), "COLUMNS": "200"})
    result = runner.invoke(app, ["serve"], env={"STROP_HOST": "0.0.0.0"})
    assert result.exit_code == 2
    assert "without keys" in " ".join(result.output.split())
    result = runner.invoke(app, ["keys", "create", "--project", "p", "--scope", "reward,fly"])
    assert result.exit_code == 2
    result = runner.invoke(app, ["keys", "create", "--project", "p", "--scope", "reward"])
    assert result.stdout.strip().startswith("sk-strop-")
    secret = result.stdout.strip()
    listed = runner.invoke(app, ["keys", "list"]).output
    assert "reward" in listed
    assert secret not in listed
    key_id = next(word for word in listed.split() if word.startswith("key-"))
    assert runner.invoke(app, ["keys", "revoke", key_id]).exit_code == 0
    assert "revoked" in runner.invoke(app, ["keys", "list"]).output


async def test_replicas_are_shown_without_other_projects_and_drained_by_admins_alone(
    strop: Running,
):
    ours, theirs = make_key(strop, "ours"), make_key(strop, "theirs", "read", "inference")
    assert (await send(strop, "POST", "/v1/policies", ours, {"name": "secret"}))[0] == 201
    _, shown = await send(strop, "GET", "/v1/replicas", ours)
    (replica,) = shown["data"]
    assert replica["serves"] == ["secret@0"]
    status, shown = await send(strop, "GET", "/v1/replicas", theirs)
    assert (status, "secret" in str(shown)) == (200, False)
    status, shown = await send(strop, "GET", "/readyz", {})
    assert "secret" not in str(shown)
    # A replica is no project's own: what takes it out of use for all needs a key of the default.
    operator = make_key(strop, "default", "admin")
    for key, expected in ((theirs, 403), (ours, 403), (operator, 200)):
        for what in ("drain", "resume"):
            path = f"/v1/replicas/{replica['name']}/{what}"
            assert (await send(strop, "POST", path, key))[0] == expected


async def test_logs_hold_neither_keys_nor_prompts(
    make_strop: MakeStrop, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    caplog.set_level("DEBUG")
    secret, prompt = new_id("sk-secret-"), new_id("prompt-")
    body = {**ASK, "messages": [{"role": "user", "content": prompt}]}
    async with make_strop(admin_key=secret) as strop:
        key = {"authorization": f"Bearer {secret}"}
        url = "/v1/chat/completions"
        assert (await send(strop, "POST", url, key, body))[0] == 200
        wrong = {"authorization": f"Bearer {secret}-wrong"}
        assert (await send(strop, "POST", url, wrong, body))[0] == 401
        strop.vllm.faults.broken_json = True
        assert (await send(strop, "POST", url, key, body))[0] == 502
        strop.vllm.faults.broken_json = False
        strop.vllm.faults.drop_token_ids = True
        await send(strop, "POST", url, key, body)
        assert (await send(strop, "POST", url, key, {**body, "temperature": "x"}))[0] == 400
        # An error of the database says what failed, and not on what.
        assert strop.gateway.database.engine.hide_parameters
        with strop.gateway.database.write() as connection:
            connection.exec_driver_sql("DROP TABLE choices")
        status, answer = await send(strop, "POST", url, key, body)
        assert (status, answer["error"]["code"]) == (500, "not_logged")
        assert prompt not in str(answer)
    output = capfd.readouterr()
    said = caplog.text + output.out + output.err
    assert "was not stored" in said
    assert secret not in said
    assert prompt not in said
