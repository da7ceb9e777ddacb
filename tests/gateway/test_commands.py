"""The commands that show the log, against a running gateway."""

import asyncio
import json
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from gateway.cli import app
from gateway.store import training
from gateway.store.claims import TrainablePolicy, claim_groups
from tests.gateway.conftest import Running
from tests.gateway.test_cli import strop_command

ASK = [{"role": "user", "content": "Which [bold]file[/]?"}]


async def episodes(strop: Running, count: int = 4) -> list[str]:
    """A group whose members have different rewards; ids of completions."""
    ids = []
    for number in range(count):
        reply = await strop.client.chat.completions.create(
            model="agent",
            messages=ASK,
            max_tokens=3,
            extra_headers={"X-Strop-Group": "g", "X-Strop-Trajectory": f"t{number}"},
        )
        ids.append(reply.id)
        await strop.post("/v1/rewards", {"completion_id": reply.id, "reward": number / 4})
    return ids


def take_step(strop: Running) -> int:
    """A step that used t3, and left t0 out."""
    database = strop.gateway.database
    policy = TrainablePolicy("default", "agent", "base", 0, None, {}, {})
    groups = claim_groups(
        database,
        policy,
        "w",
        limit=1,
        group_size=2,
        settle_seconds=0,
        deadline_seconds=1e9,
        lease_seconds=60,
    )
    step = training.begin_step(database, policy, "w", {})
    ids = {t.id: t.completions[0].id for t in groups[0].trajectories}
    uses = [
        training.Use(ids["t3"], 0, "t3", "g", 0.75, 1.25, 3, None),
        training.Use(ids["t0"], 0, "t0", "g", 0.0, None, 0, "stale"),
    ]
    outcomes = [training.Outcome("t3", None), training.Outcome("t0", "stale")]
    training.finish_step(
        database,
        policy,
        step,
        "w",
        number=1,
        adapter_path=strop.gateway.settings.artifacts() / "default" / "agent" / "000000",
        probe={"token_ids": [], "logprobs": []},
        metrics={"reward_mean": 0.375, "loss": -0.1, "groups": 1, "seconds": {"forward": 6.125}},
        groups=groups,
        outcomes=outcomes,
        uses=uses,
    )
    return step


async def test_a_trajectory_is_shown_as_it_was_said(strop: Running):
    (completion, *_) = await episodes(strop, 1)
    shown = (await strop_command(strop, "trajectory", "show", "t0")).output
    assert "Which [bold]file[/]?" in shown
    assert completion in shown
    assert "It waits." in shown
    found = json.loads((await strop_command(strop, "trajectory", "show", "t0", "--json")).output)
    assert found["completions"][0]["id"] == completion
    assert "tokens" not in found["completions"][0]
    with_tokens = await strop_command(strop, "trajectory", "show", "t0", "--json", "--tokens")
    assert len(json.loads(with_tokens.output)["completions"][0]["tokens"][0]["token_ids"]) == 3
    missing = await strop_command(strop, "trajectory", "show", "nobody")
    assert missing.exit_code == 1
    assert "x-strop-trajectory" in missing.output


async def test_groups_are_listed_shown_and_closed(strop: Running):
    await episodes(strop)
    step = take_step(strop)
    listed = (await strop_command(strop, "group", "list", "--policy", "agent")).output
    assert re.search(r"g +agent +open +4 +4 +1 +stale × 1", listed)
    shown = (await strop_command(strop, "group", "show", "g")).output
    assert shown.index("t3") < shown.index("t0")
    assert f"used step {step}" in shown
    assert "skipped stale" in shown
    members = json.loads((await strop_command(strop, "group", "show", "g", "--json")).output)
    assert [m["id"] for m in members["members"]] == ["t3", "t2", "t1", "t0"]
    first = members["members"][0]
    assert (first["reward"], first["advantage"]) == (0.75, 1.25)
    assert first["answer"]["role"] == "assistant"
    closed = await strop_command(strop, "group", "close", "g")
    assert "g is closed" in closed.output
    assert json.loads((await strop_command(strop, "group", "list", "--json")).output)["data"][0][
        "closed_at"
    ]
    assert (await strop_command(strop, "group", "show", "nobody")).exit_code == 1


async def test_names_of_trajectories_and_groups_may_hold_anything(strop: Running):
    await strop.client.chat.completions.create(
        model="agent",
        messages=ASK,
        max_tokens=3,
        extra_headers={"X-Strop-Group": "a/b c", "X-Strop-Trajectory": "run/0?x#y%2F"},
    )
    for words in (
        ("trajectory", "show", "run/0?x#y%2F"),
        ("group", "show", "a/b c"),
        ("group", "close", "a/b c"),
        ("why", "run/0?x#y%2F"),
    ):
        result = await strop_command(strop, *words)
        assert result.exit_code == 0, (words, result.output)


async def test_steps_are_listed_and_shown(strop: Running):
    await episodes(strop)
    step = take_step(strop)
    assert "0.3750" in (await strop_command(strop, "step", "list", "agent")).output
    shown = (await strop_command(strop, "step", "show", str(step))).output
    assert "reward_mean" in shown
    assert "stale" in shown
    found = json.loads((await strop_command(strop, "step", "show", str(step), "--json")).output)
    assert [use["tokens"] for use in found["uses"]] == [3, 0]


async def test_a_step_is_read_in_80_columns(strop: Running):
    ids = await episodes(strop)
    step = str(take_step(strop))
    runner = CliRunner(env={"STROP_URL": strop.url, "COLUMNS": "80"})
    for words in (["step", "show", step], ["step", "list", "agent"]):
        result = await asyncio.to_thread(runner.invoke, app, words)
        assert result.exit_code == 0
        assert max(len(line) for line in result.output.splitlines()) <= 80
        if words[1] == "show":
            lines = result.output.splitlines()
            (used,) = (line for line in lines if "1.2500" in line)
            assert re.findall(r"[\w.]+", used) == ["t3", "0.7500", "1.2500", "3"]
            # The id, to be copied, is whole.
            assert any(ids[3] in line for line in lines)
            assert any("seconds: forward" in line and "6.125" in line for line in lines)


async def test_the_log_is_read_in_80_columns_and_no_id_is_cut(strop: Running):
    long = "a-task-whose-name-is-as-long-as-those-that-people-make-of-a-path-and-a-digest"
    reply = await strop.client.chat.completions.create(
        model="agent",
        messages=ASK,
        n=2,
        max_tokens=3,
        extra_headers={"X-Strop-Group": long, "X-Strop-Trajectory": "t"},
    )
    for value in (0.25, 0.5):
        body = {"completion_id": reply.id, "choice": 1, "reward": value, "comment": "too slow"}
        assert (await strop.post("/v1/rewards", body))[0] == 201
    runner = CliRunner(env={"STROP_URL": strop.url, "COLUMNS": "80"})
    outputs = []
    for words in (["group", "list"], ["trajectory", "show", "t"], ["policy", "show", "agent"]):
        result = await asyncio.to_thread(runner.invoke, app, words)
        assert result.exit_code == 0
        assert max(len(line) for line in result.output.splitlines()) <= 80
        outputs.append(result.output)
    listed, shown, _ = outputs
    column = "".join(line.split("  ")[0].strip() for line in listed.splitlines())
    assert long in column
    first, second = (line for line in shown.splitlines() if "turn 1, choice 1" in line)
    assert ("0.25" in first, "corrected" in first) == (True, True)
    assert ("0.5" in second, "corrected" in second) == (True, False)
    assert reply.id in shown


async def test_rewards_go_to_completions_and_to_trajectories(strop: Running):
    (completion,) = await episodes(strop, 1)
    result = await strop_command(
        strop, "reward", completion, "0.5", "--name", "style", "--comment", "neat", "--json"
    )
    assert json.loads(result.output)["name"] == "style"
    assert (await strop_command(strop, "reward", "t0", "-1")).exit_code == 0
    _, body = await strop.get("/v1/rewards?trajectory_id=t0")
    assert [(r["name"], r["reward"]) for r in body["data"]] == [
        ("reward", 0.0),
        ("style", 0.5),
        ("reward", -1.0),
    ]
    result = await strop_command(strop, "reward", "t0", "1", "--choice", "0")
    assert result.exit_code == 1
    assert "--choice goes with" in result.output


async def test_status_shows_how_training_goes(strop: Running):
    await episodes(strop)
    take_step(strop)
    shown = (await strop_command(strop, "status")).output
    assert "1 open" in shown
    assert "done" in shown
    assert "0.375" in shown
    assert json.loads((await strop_command(strop, "status", "--json")).output)["ready"] is True


SERVERS = {("up",), ("serve",), ("train",)}
"""They run until they are stopped, and have no answer."""


def commands(group: typer.core.TyperGroup, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words of every command that there is."""
    found = []
    for name, command in group.commands.items():
        words = (*above, name)
        inner = isinstance(command, typer.core.TyperGroup)
        found += commands(command, words) if inner else [words]
    return found


COMMANDS = sorted(set(commands(typer.main.get_group(app))) - SERVERS)


def test_the_commands_are_found():
    assert {("status",), ("step", "show"), ("replicas", "drain"), ("keys", "create")} <= {*COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_json(words):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"})
    assert "--json" in result.output


async def test_changes_are_told_in_json(strop: Running):
    for words, key, value in (
        (("pause", "agent"), "state", "paused"),
        (("resume", "agent"), "state", "active"),
        (("rollback", "agent", "0"), "alias", 0),
    ):
        result = await strop_command(strop, "policy", *words, "--json")
        assert json.loads(result.output)[key] == value


def test_keys_in_json(tmp_path):
    env = {"STROP_DATA_DIR": str(tmp_path)}
    made = json.loads(
        CliRunner().invoke(app, ["keys", "create", "--json", "--scope", "read"], env=env).stdout
    )
    assert made["key"].startswith("sk-strop-")
    listed = CliRunner().invoke(app, ["keys", "list", "--json"], env=env).stdout
    assert [key["id"] for key in json.loads(listed)["data"]] == [made["id"]]
    assert made["key"] not in listed
    revoked = CliRunner().invoke(app, ["keys", "revoke", made["id"], "--json"], env=env).stdout
    assert json.loads(revoked)["revoked"] is True


def test_the_log_goes_out_and_in_and_says_so_in_json(tmp_path):
    env = {"STROP_DATA_DIR": str(tmp_path)}

    def told(*words: str):
        result = CliRunner().invoke(app, [*words, "--json"], env=env)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    schema = told("migrate")
    assert schema["database"].endswith("strop.db")
    assert re.fullmatch(r"\d{4}", schema["revision"])
    chats = tmp_path / "chats.jsonl"
    chat = {"messages": [*ASK, {"role": "assistant", "content": "that"}], "reward": 1}
    chats.write_text(json.dumps(chat) + "\nno chat\n")
    read = told("import", str(chats), "--skip-invalid")
    assert (read["imported"], read["known"], read["skipped"]) == (1, 0, 1)
    assert "Line 2" in read["problems"][0]
    assert told("import", str(chats), "--skip-invalid")["known"] == 1
    for name, format in (("log.jsonl", "jsonl"), ("log.parquet", "parquet")):
        written = told("export", str(tmp_path / name))
        assert (written["format"], written["lines"]) == (format, 1)
        assert (tmp_path / name).stat().st_size
    result = CliRunner().invoke(app, ["export", "-", "--json"], env=env)
    assert result.exit_code == 1
    assert "Name a file for --json" in " ".join(result.output.split())


def test_a_database_that_is_away_is_said_in_words_and_without_its_password():
    env = {"STROP_DATABASE_URL": "postgresql://me:secret@127.0.0.1:9/strop", "COLUMNS": "300"}
    for words in (("migrate",), ("keys", "list"), ("export", "x.jsonl"), ("langfuse", "status")):
        result = CliRunner().invoke(app, [*words], env=env)
        assert result.exit_code == 1, words
        assert "strop doctor" in result.output
        assert "secret" not in result.output
        assert "Traceback" not in result.output


def completed(shell: str, words: list[str], url: str) -> list[str]:
    """What a shell's script is given for the last of the words."""
    env = {**os.environ, "STROP_URL": url, "_STROP_COMPLETE": f"complete_{shell}"}
    if shell == "bash":
        env |= {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    else:
        env |= {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "from gateway.cli import app; app(prog_name='strop')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if shell == "zsh":
        return re.findall(r'"([^":]+)"(?::|\s|\)|$)', done.stdout)
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_the_shell_completes_commands_options_and_names_of_policies(
    strop: Running, shell: str
):
    for words, found in (
        (["strop", "po"], "policy"),
        (["strop", "policy", "roll"], "rollback"),
        (["strop", "group", "list", "--pol"], "--policy"),
        (["strop", "policy", "show", "a"], "agent"),
        (["strop", "group", "list", "--policy", "a"], "agent"),
        (["strop", "export", "x", "--format", "par"], "parquet"),
    ):
        assert found in await asyncio.to_thread(completed, shell, words, strop.url), words
    # Nobody answers: nothing is completed, and nothing is printed into the user's line.
    words = ["strop", "policy", "show", "a"]
    away = await asyncio.to_thread(completed, shell, words, "http://127.0.0.1:9")
    assert "agent" not in away


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_can_be_installed(shell: str, tmp_path):
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code = "from gateway.cli import app; app(prog_name='strop')"
    command = [sys.executable, "-c", code, "--show-completion", shell]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert f"_STROP_COMPLETE=complete_{shell}" in done.stdout


async def test_replicas_are_listed_drained_and_resumed(strop: Running):
    name = strop.vllm.url.removeprefix("http://")
    listed = (await strop_command(strop, "replicas", "list")).output
    assert re.search(rf"{name} +serving +0 +agent@0 ", listed)
    drained = await strop_command(strop, "replicas", "drain", name)
    assert drained.exit_code == 0
    assert "gets no new requests; nothing is in flight here" in drained.output
    shown = json.loads((await strop_command(strop, "replicas", "list", "--json")).output)
    assert [(each["name"], each["state"]) for each in shown["data"]] == [(name, "drained")]
    assert (await strop.post("/v1/chat/completions", {"model": "agent", "messages": ASK}))[0] == 503
    # A URL is a name too.
    resumed = await strop_command(strop, "replicas", "resume", strop.vllm.url, "--json")
    assert json.loads(resumed.output)["state"] == "serving"
    assert (await strop.post("/v1/chat/completions", {"model": "agent", "messages": ASK}))[0] == 200
    missing = await strop_command(strop, "replicas", "drain", "nobody:8000")
    assert missing.exit_code == 1
    assert "GET /v1/replicas lists them" in " ".join(missing.output.split())
