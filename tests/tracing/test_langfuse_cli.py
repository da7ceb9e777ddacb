"""`strop langfuse …` and the settings behind it."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console
from typer.testing import CliRunner

from gateway.cli import app
from gateway.commands import langfuse as commands
from gateway.commands import shared
from gateway.settings import Settings
from gateway.store import Database, outbox
from gateway.store.rewards import NewReward
from gateway.store.writer import Writer
from gateway.tracing.settings import LangfuseProject, LangfuseSettings
from tests.fake_langfuse import FakeLangfuse
from tests.store.conftest import Captured


async def strop(tmp_path: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """The command, in a thread: Langfuse is played by this one."""
    database = {"STROP_DATABASE_URL": f"sqlite:///{tmp_path / 'strop.db'}"}
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["langfuse", *arguments], env={**database, **env}
    )
    return result.exit_code, result.output


async def test_backfill_sends_what_was_logged_before(
    tmp_path: Path, database: Database, langfuse: FakeLangfuse, captured: Captured
):
    writer = Writer(database)
    writer.start()
    items = [captured(f"t{n}", created_at=100.0 * n, finished_at=100.0 * n + 1) for n in range(6)]
    for item in items:
        await writer.store(item)
        await writer.post_rewards("default", [NewReward(1.0, completion_id=item.id)])
    await writer.close()
    code, text = await strop(tmp_path, "backfill")
    assert code == 2
    assert "LANGFUSE_PUBLIC_KEY" in text
    keys = {
        "LANGFUSE_PUBLIC_KEY": langfuse.public_key,
        "LANGFUSE_SECRET_KEY": langfuse.secret_key,
        "LANGFUSE_BASE_URL": langfuse.url,
        "TZ": "UTC",
    }
    part = ("--since", "1970-01-01T00:05:00", "--until", "1970-01-01T00:08:20")
    code, text = await strop(tmp_path, "backfill", *part, **keys)
    assert (code, "4 completions and rewards of default" in text) == (0, True), text
    assert len(langfuse.spans) == 4
    langfuse.refuses_score = lambda score: score["metadata"]["trajectory_id"] == "t5"
    code, text = await strop(tmp_path, "backfill", **keys)
    assert (code, "refused 1" in text) == (1, True), text
    assert (len(langfuse.spans), len(langfuse.scores)) == (12, 5)
    code, text = await strop(tmp_path, "status", "--json", **keys)
    assert json.loads(text) == [
        {"project": "default", "waiting": 0, "refused": 1, "oldest_seconds": 0.0}
    ]
    code, text = await strop(tmp_path, "retry", **keys)
    with database.read() as connection:
        assert len(outbox.pending(connection, "default", 9)) == 1


@pytest.mark.parametrize("terminal", [True, False])
async def test_backfill_shows_how_far_it_is_in_a_terminal_alone(
    tmp_path: Path,
    database: Database,
    langfuse: FakeLangfuse,
    captured: Captured,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80)
    for module in (commands, shared):
        monkeypatch.setattr(module, "err", console)
    writer = Writer(database)
    writer.start()
    for n in range(6):
        await writer.store(captured(f"t{n}"))
    await writer.close()
    keys = {
        "LANGFUSE_PUBLIC_KEY": langfuse.public_key,
        "LANGFUSE_SECRET_KEY": langfuse.secret_key,
        "LANGFUSE_BASE_URL": langfuse.url,
    }
    code, text = await strop(tmp_path, "backfill", "--json", **keys)
    assert code == 0, text
    assert json.loads(text)["noted"] == 6
    assert len(langfuse.spans) == 12
    assert ("Looking through the log" in shown.getvalue()) == terminal
    assert ("6/6" in shown.getvalue()) == terminal


async def test_what_waits_for_a_langfuse_that_is_no_more_can_be_dropped(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.commands.langfuse._DROPPED", 4)
    things = [(project, f"c{n}") for n in range(10) for project in ("gone", "kept")]
    with database.write() as connection:
        for project in ("gone", "kept"):
            outbox.trace_project(connection, project, 1000.0)
        outbox.add(connection, outbox.COMPLETION, things, 1000.0)
    config = tmp_path / "strop.toml"
    config.write_text(
        '[langfuse.projects.kept]\npublic_key = "p"\nsecret_key = "s"\nbase_url = "http://l"\n'
    )
    code, text = await strop(tmp_path, "forget", "--project", "kept", STROP_CONFIG=str(config))
    assert (code, "has a Langfuse" in text) == (2, True), text
    code, text = await strop(tmp_path, "forget", "--project", "gone", STROP_CONFIG=str(config))
    assert (code, "10 entries of gone are dropped" in text) == (0, True), text
    with database.write() as connection:
        outbox.add_where_traced(connection, "gone", ["new"], 1001.0)
        assert outbox.pending(connection, "gone", 99) == []
        assert len(outbox.pending(connection, "kept", 99)) == 10


def test_keys_come_from_the_environment_or_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "LANGFUSE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert LangfuseSettings().projects == {}
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-lf-1")
    assert LangfuseSettings().projects == {}, "half of the keys are none"
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-1")
    monkeypatch.setenv("LANGFUSE_BASE_URL", "https://langfuse.test/")
    monkeypatch.setenv("SHOP_SECRET", "sk-lf-2")
    config = tmp_path / "strop.toml"
    config.write_text(
        '[langfuse.projects.shop]\npublic_key = "pk-lf-2"\nsecret_key_env = "SHOP_SECRET"\n'
        'base_url = "https://eu.langfuse.test"\n[langfuse.scores.quality]\nscale = 0.5\n'
    )
    monkeypatch.setenv("STROP_CONFIG", str(config))
    found = Settings().langfuse
    assert {name: (p.secret_key, p.base_url) for name, p in found.projects.items()} == {
        "shop": ("sk-lf-2", "https://eu.langfuse.test"),
        "default": ("sk-lf-1", "https://langfuse.test"),
    }
    assert "sk-lf" not in repr(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "langfuse.test", "secret_key": "s"}, "must begin with http"),
        ({"base_url": "http://l", "secret_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"base_url": "http://l"}, "no secret_key"),
    ],
)
def test_keys_that_cannot_work_are_refused_in_words(options: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        LangfuseProject(public_key="pk", **options)
