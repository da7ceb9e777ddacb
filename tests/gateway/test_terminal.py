"""What the commands show while they are at work: in a terminal, and nowhere else."""

import asyncio
import io
import json
from types import SimpleNamespace
from typing import ClassVar

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gateway import client
from gateway.cli import app
from gateway.commands import export, shared, status
from tests.gateway.conftest import Running

LINES = 40


def write_chats(path) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [json.dumps({"messages": [*said, *said[:1], said[1]], "n": n}) for n in range(LINES)]
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_long_commands_show_a_bar_in_a_terminal_alone(
    tmp_path, monkeypatch: pytest.MonkeyPatch, terminal: bool
):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80)
    for module in (shared, export):
        monkeypatch.setattr(module, "err", console)
    write_chats(tmp_path / "chats.jsonl")
    env = {"STROP_DATA_DIR": str(tmp_path)}
    for words, bar in (
        (("import", str(tmp_path / "chats.jsonl"), "--json"), "Reading"),
        (("export", str(tmp_path / "log.jsonl"), "--json"), "Writing"),
    ):
        shown.truncate(0)
        result = CliRunner().invoke(app, [*words], env=env)
        assert result.exit_code == 0, result.output
        # The answer is alone on the standard output, with a bar or without.
        answer = json.loads(result.stdout)
        assert LINES in (answer.get("imported"), answer.get("lines"))
        assert (bar in shown.getvalue()) == terminal
        assert ("100%" in shown.getvalue()) == terminal


class Display:
    """Stands for rich's display, and keeps every picture that it was to show."""

    shown: ClassVar[list[str]] = []

    def __init__(self, first, **options):
        self.shown.clear()
        self.update(first)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def update(self, picture) -> None:
        console = Console(file=io.StringIO(), width=120)
        console.print(picture)
        self.shown.append(console.file.getvalue())


async def test_status_stays_and_follows(strop: Running, monkeypatch: pytest.MonkeyPatch):
    """Until Ctrl-C; a gateway that goes away for a moment is said, and asked again."""
    looks = 0

    def call(url, path, *args, **options):
        if path == "/readyz" and looks == 2:
            raise status.ApiFailed("the gateway does not answer")
        return client.call(url, path, *args, **options)

    def sleep(seconds):
        nonlocal looks
        looks += 1
        if looks == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "Live", Display)
    monkeypatch.setattr(status, "call", call)
    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=sleep))
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["status", "--live", "--url", strop.url]
    )
    assert result.exit_code == 0, result.output
    first, second, away, back = Display.shown
    for picture in (first, second, back):
        assert "agent@0, 0 in flight" in picture
    assert away.strip() == "the gateway does not answer"
