"""`strop doctor`: everything that a new user gets wrong, each finding with what to do about it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import typer
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from gateway.commands import doctor_machine, doctor_vllm
from gateway.commands.findings import Finding, good, wrong
from gateway.commands.shared import AsJson, busy, out, show_json
from gateway.settings import Settings
from gateway.store import Database

_MARKS = {
    "ok": "[green]✓[/]",
    "note": "[blue]·[/]",
    "warning": "[yellow]![/]",
    "error": "[red]✗[/]",
}

Check = Callable[[], Iterator[Finding]]


def doctor(as_json: AsJson = False) -> None:
    """Look at settings, database, disk, keys, vLLM and clocks; say what is wrong, and the cure.

    Run it where the gateway runs. The exit code is 1 if something is wrong.
    """
    found: list[Finding] = []
    for finding in examine():
        found.append(finding)
        if not as_json:
            _show(finding)
    errors = sum(finding.level == "error" for finding in found)
    warnings = sum(finding.level == "warning" for finding in found)
    if as_json:
        show_json({"ok": not errors, "findings": [asdict(finding) for finding in found]})
    elif errors or warnings:
        out.print(f"{errors} wrong, {warnings} doubtful.")
    else:
        out.print("[green]Nothing is wrong.[/]")
    raise typer.Exit(1 if errors else 0)


def _show(finding: Finding) -> None:
    # Marks in a column of their own: a text of several lines stays beside them.
    lines = Table.grid(padding=(0, 1, 0, 0))
    lines.add_row(_MARKS[finding.level], f"{escape(finding.about)}: {escape(finding.text)}")
    if finding.fix:
        lines.add_row("", f"→ {escape(finding.fix)}")
    out.print(lines, highlight=False)


def examine() -> Iterator[Finding]:
    """Every finding, as it comes."""
    yield from doctor_machine.unknown_settings()
    try:
        settings = Settings()
    except ValidationError as error:
        for item in error.errors():
            place = ".".join(str(part) for part in item["loc"])
            yield wrong(
                "settings",
                f"{place}: {item['msg']}",
                "Correct it in strop.toml or the environment.",
            )
        return
    yield good("settings", "they can be read")
    database: Database | None = None
    for finding, opened in doctor_machine.database(settings):
        database = opened or database
        yield finding
    answers: dict[str, Any] = {}
    checks: dict[str, Check] = {
        "disk": lambda: doctor_machine.disk(settings),
        "keys": lambda: doctor_machine.keys_and_address(settings, database),
        "gateway": lambda: doctor_machine.gateway(settings, answers),
        "vLLM": lambda: doctor_vllm.replicas(settings, database, answers),
        "training": lambda: doctor_machine.training(database),
        "webhooks": lambda: doctor_machine.webhooks(settings),
        "Langfuse": lambda: doctor_machine.langfuse(settings),
    }
    for about, check in checks.items():
        steps = check()
        while True:
            try:
                with busy(f"Looking at {about}"):
                    finding = next(steps)
            except StopIteration:
                break
            except Exception as error:
                yield wrong(
                    about,
                    f"it could not be looked at: {type(error).__name__}: {error}",
                    "Mend what stands above first, then run `strop doctor` again.",
                )
                break
            yield finding
    if database is not None:
        database.dispose()
