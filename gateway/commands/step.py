"""`strop step …`: the optimiser steps that were taken, and taking one again."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from gateway.commands.shared import (
    URL,
    AsJson,
    PolicyName,
    Url,
    ask,
    listing,
    right,
    show,
    when,
    words,
)

step_app = typer.Typer(help="The optimiser steps that were taken, and taking one again.")


@step_app.command("list")
def list_steps(
    policy: PolicyName,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """The steps of a policy, the newest first."""
    answer = ask(url, f"/v1/policies/{policy}/steps?limit={limit}")
    table = listing(
        right("step"),
        right("from"),
        right("made"),
        "state",
        *(right(name) for name in ("groups", "reward", "loss")),
        "when",
        "error",
    )
    for step in answer["data"]:
        metrics = step["metrics"] or {}
        made = step["version"]
        table.add_row(
            str(step["id"]),
            f"@{step['parent_version']}",
            f"@{made}" if made is not None else "",
            step["state"],
            str(metrics.get("groups", "")),
            _number(metrics.get("reward_mean")),
            _number(metrics.get("loss")),
            when(step["started_at"]),
            escape(step["error"] or ""),
        )
    show(answer, as_json, table)


@step_app.command("show")
def show_step(step: int, url: Url = URL, as_json: AsJson = False) -> None:
    """A step: its metrics, and every completion that it used or left out."""
    found = ask(url, f"/v1/steps/{step}")
    made = f", made @{found['version']}" if found["version"] is not None else ""
    shown: list[RenderableType] = [
        f"Step {step} of {found['policy']}, from @{found['parent_version']}{made}: "
        f"{found['state']}, {when(found['started_at'])}"
    ]
    if found["error"]:
        shown.append(f"[red]{escape(found['error'])}[/]")
    metrics = listing("metric", right("value"))
    for name, value in _flat(found["metrics"] or {}):
        metrics.add_row(escape(name), f"{value:.4g}" if isinstance(value, float) else str(value))
    shown.append(metrics)
    groups: dict[str, list[dict[str, Any]]] = {}
    for use in found["uses"]:
        groups.setdefault(use["group_id"], []).append(use)
    shown += [_uses(group, uses) for group, uses in groups.items()]
    show(found, as_json, *shown)


def _uses(group: str, uses: list[dict[str, Any]]) -> Table:
    # What is read together stands in one line at 80 columns too; the ids are below each other.
    numbers = (right(name) for name in ("reward", "advantage", "tokens"))
    title = f"group {escape(group)}"
    table = listing("trajectory and completion", *numbers, "left out", title=title)
    for use in uses:
        table.add_row(
            f"{escape(use['trajectory_id'])}\n[dim]{use['completion_id']}[/]",
            _number(use["reward"]),
            _number(use["advantage"]),
            str(use["tokens"]),
            words(use["reason"]),
        )
    return table


def _flat(metrics: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Metrics, those in tables of their own under both names."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}: ")
        else:
            yield f"{above}{name}", value


@step_app.command(
    "replay", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def replay(context: typer.Context) -> None:
    """Take a step again from the log and compare: STEP [--project P] [--out DIR] [--json]."""
    command = [sys.executable, "-m", "trainer", "replay", *context.args]
    raise typer.Exit(subprocess.call(command))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
