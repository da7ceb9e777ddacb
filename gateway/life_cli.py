"""`strop policy fork|pause|resume|promote|drop|events` and `strop step …`."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gateway.client import ApiFailed, call

out = Console()
err = Console(stderr=True)
step_app = typer.Typer(help="The optimiser steps that were taken, and taking one again.")

Url = Annotated[str, typer.Option("--url", envvar="STROP_URL", help="The gateway's address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
_URL = "http://127.0.0.1:8000"


def _ask(url: str, path: str, body: Any = None) -> Any:
    try:
        return call(url, path, body, timeout=120.0)
    except ApiFailed as error:
        err.print(f"[red]Error:[/] {error}", highlight=False)
        raise typer.Exit(1) from None


def register(policy_app: typer.Typer) -> None:
    """Add the commands to `strop policy`."""
    for name, command in _COMMANDS.items():
        policy_app.command(name)(command)


def fork(name: str, version: int, new: str, url: Url = _URL) -> None:
    """Make a new policy whose version 0 is a version of this one."""
    _ask(url, f"/v1/policies/{name}/fork", {"version": version, "name": new})
    out.print(f"{new}@0 is {name}@{version}; it trains from there.", highlight=False)


def pause(
    name: str,
    reason: Annotated[str, typer.Option(help="Shown to whoever asks why.")] = "paused by command",
    url: Url = _URL,
) -> None:
    """Take no more steps; serving goes on."""
    _ask(url, f"/v1/policies/{name}/pause", {"reason": reason})
    out.print(f"{name} is served and not trained.", highlight=False)


def resume(
    name: str,
    rate_factor: Annotated[
        float | None,
        typer.Option(help="What the settings' learning rate is multiplied with from now on."),
    ] = None,
    url: Url = _URL,
) -> None:
    """Take steps again."""
    body = {"rate_factor": rate_factor}
    policy = _ask(url, f"/v1/policies/{name}/resume", body)
    factor = policy["learning_rate_factor"]
    out.print(
        f"{name} is trained, from @{policy['head']}, with {factor:g} times its learning rate.",
        highlight=False,
    )


def promote(name: str, url: Url = _URL) -> None:
    """End the trial of a new version: it serves everybody."""
    policy = _ask(url, f"/v1/policies/{name}/promote", {})
    out.print(f"{name} serves @{policy['alias']} now.", highlight=False)


def drop(name: str, url: Url = _URL) -> None:
    """End the trial of a new version: it serves nobody."""
    policy = _ask(url, f"/v1/policies/{name}/drop", {})
    out.print(f"{name} serves @{policy['alias']} and trains from it.", highlight=False)


def events(
    name: str,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = _URL,
    as_json: AsJson = False,
) -> None:
    """What happened to a policy, and why; the newest first."""
    answer = _ask(url, f"/v1/policies/{name}/events?limit={limit}")
    if as_json:
        out.print_json(json.dumps(answer))
        return
    table = Table("when", "what", "version", "why")
    for event in answer["data"]:
        detail = event["detail"]
        table.add_row(
            _when(event["at"]),
            event["kind"],
            f"@{event['version']}" if event["version"] is not None else "",
            str(detail.get("why") or detail.get("error") or ""),
        )
    out.print(table)


_COMMANDS: dict[str, Callable[..., None]] = {
    "fork": fork,
    "pause": pause,
    "resume": resume,
    "promote": promote,
    "drop": drop,
    "events": events,
}


@step_app.command("list")
def list_steps(
    policy: str,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = _URL,
    as_json: AsJson = False,
) -> None:
    """The steps of a policy, the newest first."""
    answer = _ask(url, f"/v1/policies/{policy}/steps?limit={limit}")
    if as_json:
        out.print_json(json.dumps(answer))
        return
    table = Table("step", "from", "made", "state", "groups", "reward", "loss", "when", "error")
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
            _when(step["started_at"]),
            step["error"] or "",
        )
    out.print(table)


@step_app.command("show")
def show_step(step: int, url: Url = _URL) -> None:
    """A step: its settings, its metrics, and every completion that it used."""
    out.print_json(json.dumps(_ask(url, f"/v1/steps/{step}")))


@step_app.command(
    "replay", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def replay(context: typer.Context) -> None:
    """Take a step again from the log; arguments are those of `python -m trainer replay`."""
    command = [sys.executable, "-m", "trainer", "replay", *context.args]
    raise typer.Exit(subprocess.call(command))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")
