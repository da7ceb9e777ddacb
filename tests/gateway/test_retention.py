"""`/v1/retention`: a project's own rule, over HTTP and by the command line."""

import json
import time

import pytest

from gateway import retention
from gateway.store import keys
from tests.gateway.conftest import MakeStrop, Running
from tests.gateway.test_cli import strop_command

ASK = {"model": "agent", "messages": [{"role": "user", "content": "Which file?"}], "max_tokens": 3}


async def send(strop: Running, method: str, body=None, **headers: str):
    url = strop.url + "/v1/retention"
    async with strop.http.request(method, url, json=body, headers=headers) as response:
        return response.status, await response.json()


def rule(days: float | None, source: str, default: float | None) -> dict:
    return {"object": "retention", "days": days, "source": source, "default_days": default}


async def test_a_rule_is_set_read_and_given_up(make_strop: MakeStrop):
    async with make_strop(retention_days=90.0) as strop:
        assert await send(strop, "GET") == (200, rule(90.0, "settings", 90.0))
        for days in (30.5, None, 7.0):
            assert await send(strop, "PUT", {"days": days}) == (200, rule(days, "project", 90.0))
            assert await send(strop, "GET") == (200, rule(days, "project", 90.0))
        for _ in range(2):
            assert await send(strop, "DELETE") == (200, rule(90.0, "settings", 90.0))


async def test_the_settings_of_a_project_are_its_default(make_strop: MakeStrop):
    async with make_strop(retention_days=9.0, project_retention_days={"default": 5.0}) as strop:
        assert await send(strop, "GET") == (200, rule(5.0, "settings", 5.0))


async def test_without_any_rule_nothing_is_deleted(strop: Running):
    assert await send(strop, "GET") == (200, rule(None, "settings", None))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"days": 0},
        {"days": -1},
        {"days": 1e9},
        {"days": "soon"},
        {"days": [1]},
        {"day": 3},
        {"days": 3, "project": "other"},
        [],
        None,
    ],
)
async def test_what_is_no_rule_is_refused_and_the_old_one_stays(strop: Running, body):
    await send(strop, "PUT", {"days": 3})
    status, answer = await send(strop, "PUT", body)
    assert status == 422, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert (await send(strop, "GET"))[1]["days"] == 3


async def test_a_rule_deletes_what_is_older_in_its_own_project(make_strop: MakeStrop):
    async with make_strop() as strop:
        auth = {}
        for project in ("ours", "theirs"):
            with strop.gateway.database.write() as connection:
                key = keys.create(connection, project, "test", ["admin"])[1]
            auth[project] = {"authorization": f"Bearer {key}"}
            assert (await strop.post("/v1/policies", {"name": "agent"}, **auth[project]))[0] == 201
            headers = {**auth[project], "X-Strop-Trajectory": "t"}
            assert (await strop.post("/v1/chat/completions", ASK, **headers))[0] == 200
        assert (await send(strop, "PUT", {"days": 2}, **auth["ours"]))[0] == 200
        assert (await send(strop, "GET", **auth["theirs"]))[1]["days"] is None
        gateway = strop.gateway
        for days, expected in ((1, 0), (3, 1)):
            now = time.time() + days * 86_400
            assert expected == await retention.delete_once(
                gateway.database, gateway.writer, None, {}, now
            )
        for project, status in (("ours", 404), ("theirs", 200)):
            async with strop.http.get(
                f"{strop.url}/v1/trajectories/t", headers=auth[project]
            ) as response:
                assert response.status == status


async def test_a_rule_is_set_with_admin_and_read_with_read(strop: Running):
    auth = {}
    for scope in keys.SCOPES:
        with strop.gateway.database.write() as connection:
            key = keys.create(connection, "default", "test", [scope])[1]
        auth[scope] = {"authorization": f"Bearer {key}"}
    may = {
        method: {s for s in keys.SCOPES if (await send(strop, method, body, **auth[s]))[0] == 200}
        for method, body in (("GET", None), ("PUT", {"days": 3}), ("DELETE", None))
    }
    assert may == {"GET": {"read", "admin"}, "PUT": {"admin"}, "DELETE": {"admin"}}


async def test_the_command_line_shows_sets_and_resets_it(make_strop: MakeStrop):
    async with make_strop(retention_days=90.0) as strop:
        shown = await strop_command(strop, "retention", "show")
        assert "deleted 90 days after" in shown.output
        assert "the gateway's settings" in shown.output
        changed = await strop_command(strop, "retention", "set", "30")
        assert "deleted 30 days after" in changed.output
        assert "the project's own rule" in changed.output
        assert "for ever" in (await strop_command(strop, "retention", "set", "--never")).output
        assert (await send(strop, "GET"))[1] == rule(None, "project", 90.0)
        wrong = (("set",), ("set", "3", "--never"), ("set", "0"), ("set", "soon"))
        for words in wrong:
            result = await strop_command(strop, "retention", *words)
            assert result.exit_code != 0, words
            assert "Error" in result.output, words
        assert (await send(strop, "GET"))[1] == rule(None, "project", 90.0)
        reset = await strop_command(strop, "retention", "reset", "--json")
        assert json.loads(reset.output) == rule(90.0, "settings", 90.0)
