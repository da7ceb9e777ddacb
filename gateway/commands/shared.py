"""What the commands share: where to print, how to ask, how to show that it takes long."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from gateway.client import ApiFailed, call

out = Console()
err = Console(stderr=True)

URL = "http://127.0.0.1:8000"


def policy_names(context: typer.Context, incomplete: str) -> list[str]:
    """The names of policies that begin so, for shell completion; none while nobody answers."""
    url = context.params.get("url") or URL
    try:
        found = call(url, "/v1/policies", timeout=2.0)["data"]
    except Exception:
        return []
    return [policy["name"] for policy in found if policy["name"].startswith(incomplete)]


Url = Annotated[str, typer.Option("--url", envvar="STROP_URL", help="The gateway's address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
PolicyName = Annotated[str, typer.Argument(autocompletion=policy_names)]


def ask(url: str, path: str, body: Any = None, *, what: str = "Asking the gateway") -> Any:
    """The gateway's answer; an error ends the command with its message."""
    try:
        with busy(what):
            return call(url, path, body, timeout=120.0)
    except ApiFailed as error:
        raise failed(str(error)) from None


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A moving mark on the standard error, if that is a terminal, for as long as it takes."""
    if not err.is_terminal:
        yield
        return
    with err.status(what):
        yield


def failed(message: str) -> typer.Exit:
    """Say what is wrong; raise what this returns."""
    err.print(f"[red]Error:[/] {message}", highlight=False)
    return typer.Exit(1)


def show_json(answer: Any) -> None:
    """Print an answer as it came."""
    typer.echo(json.dumps(answer, indent=2))


def when(at: float | None) -> str:
    """A time as people here read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at is not None else ""


def number(value: float | None) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.4g}"
