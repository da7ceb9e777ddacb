"""`strop policy fork|pause|resume|promote|drop|events` and `strop step …`."""

import subprocess
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from gateway.commands.shared import URL, AsJson, PolicyName, Url, ask, out, show_json, when

step_app = typer.Typer(help="The optimiser steps that were taken, and taking one again.")


def register(policy_app: typer.Typer) -> None:
    """Add the commands to `strop policy`."""
    for name, command in _COMMANDS.items():
        policy_app.command(name)(command)


def fork(name: PolicyName, version: int, new: str, url: Url = URL, as_json: AsJson = False) -> None:
    """Make a new policy whose version 0 is a version of this one."""
    answer = ask(url, f"/v1/policies/{name}/fork", {"version": version, "name": new})
    if as_json:
        show_json(answer)
        return
    out.print(f"{new}@0 is {name}@{version}; it trains from there.", highlight=False)


def pause(
    name: PolicyName,
    reason: Annotated[str, typer.Option(help="Shown to whoever asks why.")] = "paused by command",
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Take no more steps; serving goes on."""
    answer = ask(url, f"/v1/policies/{name}/pause", {"reason": reason})
    if as_json:
        show_json(answer)
        return
    out.print(f"{name} is served and not trained.", highlight=False)


def resume(
    name: PolicyName,
    rate_factor: Annotated[
        float | None,
        typer.Option(help="What the settings' learning rate is multiplied with from now on."),
    ] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Take steps again."""
    body = {"rate_factor": rate_factor}
    policy = ask(url, f"/v1/policies/{name}/resume", body)
    if as_json:
        show_json(policy)
        return
    factor = policy["learning_rate_factor"]
    out.print(
        f"{name} is trained, from @{policy['head']}, with {factor:g} times its learning rate.",
        highlight=False,
    )


def promote(name: PolicyName, url: Url = URL, as_json: AsJson = False) -> None:
    """End the trial of a new version: it serves everybody."""
    policy = ask(url, f"/v1/policies/{name}/promote", {})
    if as_json:
        show_json(policy)
        return
    out.print(f"{name} serves @{policy['alias']} now.", highlight=False)


def drop(name: PolicyName, url: Url = URL, as_json: AsJson = False) -> None:
    """End the trial of a new version: it serves nobody."""
    policy = ask(url, f"/v1/policies/{name}/drop", {})
    if as_json:
        show_json(policy)
        return
    out.print(f"{name} serves @{policy['alias']} and trains from it.", highlight=False)


def events(
    name: PolicyName,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """What happened to a policy, and why; the newest first."""
    answer = ask(url, f"/v1/policies/{name}/events?limit={limit}")
    if as_json:
        show_json(answer)
        return
    table = Table("when", "what", "version", "why")
    for event in answer["data"]:
        detail = event["detail"]
        table.add_row(
            when(event["at"]),
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
    policy: PolicyName,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """The steps of a policy, the newest first."""
    answer = ask(url, f"/v1/policies/{policy}/steps?limit={limit}")
    if as_json:
        show_json(answer)
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
            when(step["started_at"]),
            step["error"] or "",
        )
    out.print(table)


@step_app.command("show")
def show_step(step: int, url: Url = URL, as_json: AsJson = False) -> None:
    """A step: its metrics, and every completion that it used or left out."""
    found = ask(url, f"/v1/steps/{step}")
    if as_json:
        show_json(found)
        return
    made = f", made @{found['version']}" if found["version"] is not None else ""
    out.print(
        f"Step {step} of {found['policy']}, from @{found['parent_version']}{made}: "
        f"{found['state']}, {when(found['started_at'])}",
        highlight=False,
    )
    if found["error"]:
        out.print(f"[red]{escape(found['error'])}[/]", highlight=False)
    metrics = Table("metric", "value")
    for name, value in (found["metrics"] or {}).items():
        metrics.add_row(name, f"{value:.4g}" if isinstance(value, float) else escape(str(value)))
    out.print(metrics)
    uses = Table("completion", "trajectory", "group", "reward", "advantage", "tokens", "left out")
    for use in found["uses"]:
        uses.add_row(
            use["completion_id"],
            escape(use["trajectory_id"]),
            escape(use["group_id"]),
            _number(use["reward"]),
            _number(use["advantage"]),
            str(use["tokens"]),
            use["reason"] or "",
        )
    out.print(uses)


@step_app.command(
    "replay", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def replay(context: typer.Context) -> None:
    """Take a step again from the log; arguments are those of `python -m trainer replay`."""
    command = [sys.executable, "-m", "trainer", "replay", *context.args]
    raise typer.Exit(subprocess.call(command))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
