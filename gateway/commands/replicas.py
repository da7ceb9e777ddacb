"""`strop replicas`: the vLLM servers, and taking one out of use for as long as it is worked on."""

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape

from gateway.commands.shared import URL, AsJson, Url, ask, listing, names_at, right, show

replicas_app = typer.Typer(help="The vLLM servers: what each serves, draining and resuming one.")

_COLOURS = {"serving": "green", "draining": "yellow", "drained": "yellow"}


Name = Annotated[
    str,
    typer.Argument(
        help="As `strop replicas list` shows it: host:port.",
        autocompletion=names_at("/v1/replicas"),
    ),
]


@replicas_app.command("list")
def list_replicas(url: Url = URL, as_json: AsJson = False) -> None:
    """All replicas, as the gateway sees them."""
    answer = ask(url, "/v1/replicas")
    table = listing("replica", "state", right("in flight"), "serves", right("failures"), "error")
    for replica in answer["data"]:
        table.add_row(
            escape(replica["name"]),
            _state(replica),
            str(replica["in_flight"]),
            escape(", ".join(replica["serves"])),
            str(replica["failures"] or ""),
            escape(replica["error"] or ""),
        )
    none = "There is none: set STROP_REPLICAS, or run `strop up`."
    show(answer, as_json, table if answer["data"] else none)


@replicas_app.command("drain")
def drain(name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Give a replica no new requests, from any gateway; what it has begun it ends."""
    replica = _asked(url, name, "drain")
    left = replica["in_flight"]
    rest = f"{left} requests are still in flight" if left else "nothing is in flight"
    show(replica, as_json, f"{escape(name)} gets no new requests; {rest} here.")


@replicas_app.command("resume")
def resume(name: Name, url: Url = URL, as_json: AsJson = False) -> None:
    """Use a replica again."""
    replica = _asked(url, name, "resume")
    show(replica, as_json, f"{escape(name)} is {replica['state']}.")


def _asked(url: str, name: str, what: str) -> dict[str, Any]:
    """The replica after the change."""
    short = name.partition("://")[2] or name
    path = f"/v1/replicas/{quote(short.rstrip('/'), safe='')}/{what}"
    replica: dict[str, Any] = ask(url, path, {})
    return replica


def _state(replica: dict[str, Any]) -> str:
    colour = _COLOURS.get(replica["state"], "red")
    return f"[{colour}]{replica['state']}[/]"
