"""`strop retention`: for how long the log of the key's project is kept."""

from typing import Annotated, Any

import typer

from gateway.commands.shared import URL, AsJson, Url, ask, failed, show

retention_app = typer.Typer(help="For how long the project's log is kept.")

PATH = "/v1/retention"


@retention_app.command("show")
def show_retention(url: Url = URL, as_json: AsJson = False) -> None:
    """The rule of the project."""
    _show(ask(url, PATH), as_json)


@retention_app.command("set")
def set_retention(
    days: Annotated[
        float | None,
        typer.Argument(help="Days after its last completion or reward.", show_default=False),
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Delete nothing.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Delete trajectories of this age; those that are older already go within the hour."""
    if (days is None) is not never:
        raise failed("name the days, or --never.")
    _show(ask(url, PATH, {"days": days}, method="PUT"), as_json)


@retention_app.command("reset")
def reset_retention(url: Url = URL, as_json: AsJson = False) -> None:
    """Go back to the rule of the gateway's settings."""
    _show(ask(url, PATH, method="DELETE"), as_json)


def _show(rule: dict[str, Any], as_json: bool) -> None:
    days = rule["days"]
    if days is None:
        kept = "Trajectories are kept for ever"
    else:
        kept = f"Trajectories are deleted {days:g} days after their last completion or reward"
    whose = "the project's own rule" if rule["source"] == "project" else "the gateway's settings"
    show(rule, as_json, f"{kept} ({whose}).")
