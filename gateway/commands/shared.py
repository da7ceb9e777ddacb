"""What the commands share: where to print, how to ask, how to show that it takes long."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from gateway.client import ApiFailed, call
from gateway.settings import Settings
from gateway.store import Database

out = Console()
err = Console(stderr=True)

URL = "http://127.0.0.1:8000"


def names_at(path: str) -> Callable[[typer.Context, str], list[str]]:
    """Shell completion by the names of what the gateway lists there; none while it is away."""

    def names(context: typer.Context, incomplete: str) -> list[str]:
        url = context.params.get("url") or URL
        try:
            found = call(url, path, timeout=2.0)["data"]
        except Exception:
            return []
        return [each["name"] for each in found if each["name"].startswith(incomplete)]

    return names


policy_names = names_at("/v1/policies")


Url = Annotated[str, typer.Option("--url", envvar="STROP_URL", help="The gateway's address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
PolicyName = Annotated[str, typer.Argument(autocompletion=policy_names)]


def ask(
    url: str,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    what: str = "Asking the gateway",
) -> Any:
    """The gateway's answer; an error ends the command with its message."""
    try:
        with busy(what):
            return call(url, path, body, method=method, timeout=120.0)
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


@contextmanager
def progress(what: str, total: float | None) -> Iterator[Callable[[float], None]]:
    """A bar on the standard error, if that is a terminal; it is called with what was done since."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def settings() -> Settings:
    """What is set; what cannot be read ends the command with the names of what is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            what = f"The setting {name} is wrong:" if name else "The settings are wrong:"
            err.print(f"[red]{what}[/] {escape(item['msg'])}", highlight=False)
        raise typer.Exit(2) from None


@contextmanager
def opened() -> Iterator[tuple[Settings, Database]]:
    """What is set, and the database that it names, its schema up to date."""
    found = settings()
    database = Database(found.url())
    try:
        try:
            with busy("Opening the database"):
                database.migrate()
        except SQLAlchemyError as error:
            raise failed(
                f"the database {shown_url(found.url())} cannot be used: "
                f"{str(getattr(error, 'orig', error)).strip()}. `strop doctor` says what to do."
            ) from None
        yield found, database
    finally:
        database.dispose()


def shown_url(url: str) -> str:
    """The address of a database, without its password."""
    return make_url(url).render_as_string(hide_password=True)


def failed(message: str) -> typer.Exit:
    """Say what is wrong; raise what this returns."""
    err.print(f"[red]Error:[/] {escape(message)}", highlight=False)
    return typer.Exit(1)


def show(answer: Any, as_json: bool, *shown: RenderableType) -> None:
    """Print an answer: as JSON, if that is asked for, or as people read it."""
    if as_json:
        show_json(answer)
        return
    for part in shown:
        out.print(part, highlight=False)


def show_json(answer: Any) -> None:
    """Print an answer as it came."""
    typer.echo(json.dumps(answer, indent=2))


def listing(*columns: str | Column, title: str | None = None) -> Table:
    """A table that 80 columns have room for: nothing is cut off, least of all an id, which people
    copy, and no lines stand between the columns."""
    return Table(
        *(Column(c, overflow="fold") if isinstance(c, str) else c for c in columns),
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def right(name: str) -> Column:
    """A column of numbers."""
    return Column(name, justify="right")


def words(reason: str | None) -> str:
    """A reason as people read it."""
    return (reason or "").replace("_", " ")


def when(at: float | None) -> str:
    """A time as people here read it; of today without the date."""
    if at is None:
        return ""
    then, now = time.localtime(at), time.localtime()
    today = (then.tm_year, then.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def number(value: float | None) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.4g}"
