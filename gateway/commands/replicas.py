"""`strop replicas`: the vLLM servers, and taking one out of use for as long as it is worked on."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from gateway.client import call
from gateway.commands.shared import URL, AsJson, Url, ask, out, show_json

replicas_app = typer.Typer(help="The vLLM servers: what each serves, draining and resuming one.")

_COLOURS = {"serving": "green", "draining": "yellow", "drained": "yellow"}


def _names(context: typer.Context, incomplete: str) -> list[str]:
    """The names of replicas that begin so, for shell completion; none while nobody answers."""
    url = context.params.get("url") or URL
    try:
        found = call(url, "/v1/replicas", timeout=2.0)["data"]
    except Exception:
        return []
    return [replica["name"] for replica in found if replica["name"].startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(help="As `strop replicas list` shows it: host:port.", autocompletion=_names)
]


@replicas_app.command("list")
def list_replicas(url: Url = URL, as_json: AsJson = False) -> None:
    """All replicas, as the gateway sees them."""
    answer = ask(url, "/v1/replicas")
    if as_json:
        show_json(answer)
        return
    if not answer["data"]:
        out.print("There is none: set STROP_REPLICAS, or run `strop up`.")
        return
    table = Table("replica", "state", "in flight", "serves", "failures", "error")
    for replica in answer["data"]:
        table.add_row(
            escape(replica["name"]),
            _state(replica),
            str(replica["in_flight"]),
            escape(", ".join(replica["serves"])),
            str(replica["failures"] or ""),
            escape(replica["error"] or ""),
        )
    out.print(table)


@replicas_app.command("drain")
def drain(name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Give a replica no new requests, from any gateway; what it has begun it ends."""
    replica = _asked(url, name, "drain", as_json)
    if replica is None:
        return
    left = replica["in_flight"]
    rest = f"{left} requests are still in flight" if left else "nothing is in flight"
    out.print(f"{name} gets no new requests; {rest} here.", highlight=False, markup=False)


@replicas_app.command("resume")
def resume(name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Use a replica again."""
    replica = _asked(url, name, "resume", as_json)
    if replica is not None:
        out.print(f"{name} is {replica['state']}.", highlight=False, markup=False)


def _asked(url: str, name: str, what: str, as_json: bool) -> dict[str, Any] | None:
    """The replica after the change; None: it has been printed."""
    short = name.partition("://")[2] or name
    path = f"/v1/replicas/{quote(short.rstrip('/'), safe='')}/{what}"
    replica: dict[str, Any] = ask(url, path, {})
    if as_json:
        show_json(replica)
        return None
    return replica


def _state(replica: dict[str, Any]) -> str:
    colour = _COLOURS.get(replica["state"], "red")
    return f"[{colour}]{replica['state']}[/]"
