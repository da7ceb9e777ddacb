"""`strop status`: whether requests would be answered, what is learned, what waits and why."""

import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gateway.client import ApiFailed, call
from gateway.commands.shared import (
    URL,
    AsJson,
    Url,
    ask,
    listing,
    number,
    out,
    right,
    show_json,
    when,
)

_SECONDS = 1.0


def status(
    url: Url = URL,
    live: Annotated[
        bool, typer.Option("--live", "-l", help="Stay, and show it anew every second.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Whether requests would be answered, what is wrong if not, and how training goes."""
    ready = ask(url, "/readyz")
    if as_json:
        show_json(ready)
        raise typer.Exit(0 if ready["ready"] else 1)
    if not live:
        out.print(_shown(ready, _training(url)))
        raise typer.Exit(0 if ready["ready"] else 1)
    with Live(_shown(ready, _training(url)), console=out, refresh_per_second=4) as display:
        try:
            while True:
                time.sleep(_SECONDS)
                try:
                    display.update(_shown(call(url, "/readyz"), _training(url)))
                except ApiFailed as error:
                    display.update(Text(str(error), style="red"))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def _training(url: str) -> list[dict[str, Any]]:
    """Policies with their groups and last step; none for a key that may not read them."""
    try:
        policies = call(url, "/v1/policies")["data"]
        groups = call(url, "/v1/groups?limit=500")["data"]
        for policy in policies:
            name = policy["name"]
            policy["groups"] = [group for group in groups if group["policy"] == name]
            steps = call(url, f"/v1/policies/{name}/steps?limit=1")["data"]
            policy["last_step"] = steps[0] if steps else None
    except ApiFailed:
        return []
    return list(policies)


def _shown(ready: dict[str, Any], policies: list[dict[str, Any]]) -> RenderableType:
    parts: list[RenderableType] = [
        Text("ready", style="green") if ready["ready"] else Text("not ready", style="red")
    ]
    parts += [Text(f"  - {problem}") for problem in ready["problems"]]
    parts += [Text(f"  - {warning}", style="yellow") for warning in ready.get("warnings", [])]
    for name, failure in ready["failed_versions"].items():
        parts.append(Text(f"  - {name} failed its probe: {failure.get('error')}"))
    for replica in ready["replicas"]:
        serves = ", ".join(replica["serves"]) or replica["error"]
        parts.append(Text(f"  {replica['url']}: {serves}, {replica['in_flight']} in flight"))
    if ready.get("journal") and ready["journal"]["entries"]:
        parts.append(Text(f"  {ready['journal']['entries']} entries wait in the journal"))
    if policies:
        parts.append(_policies(policies))
    return Group(*parts)


def _policies(policies: list[dict[str, Any]]) -> Table:
    table = listing(
        "policy", "serves", "trains from", "state", "groups", "last step", right("reward")
    )
    for policy in policies:
        states: dict[str, int] = {}
        for group in policy["groups"]:
            states[group["state"]] = states.get(group["state"], 0) + 1
        step = policy["last_step"]
        metrics = (step or {}).get("metrics") or {}
        table.add_row(
            escape(policy["name"]),
            f"@{policy['alias']}",
            f"@{policy['head']}",
            policy["state"],
            ", ".join(f"{count} {state}" for state, count in states.items()),
            f"{step['state']}, {when(step['started_at'])}" if step else "none yet",
            number(metrics.get("reward_mean")),
        )
    return table
