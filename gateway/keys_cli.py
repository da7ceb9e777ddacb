"""`strop keys …`: made on the machine of the database, for there is no key to ask with yet."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gateway.settings import Settings
from gateway.store import Database, keys
from gateway.store.models import DEFAULT_PROJECT

keys_app = typer.Typer(help="Who may ask, and for what.")
out = Console()
err = Console(stderr=True)


def _database() -> Database:
    database = Database(Settings().url())
    database.migrate()
    return database


@keys_app.command("create")
def create_key(
    project: Annotated[str, typer.Option(help="The project whose rows it sees.")] = DEFAULT_PROJECT,
    scope: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(keys.SCOPES)}.")
    ] = "inference,reward,read",
    name: Annotated[str, typer.Option(help="To tell it from others.")] = "",
) -> None:
    """Make a key. It is shown this once; only its digest is kept."""
    scopes = [part.strip() for part in scope.split(",") if part.strip()]
    try:
        with _database().write() as connection:
            key, secret = keys.create(connection, project, name, scopes)
    except ValueError as error:
        err.print(f"[red]Error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    err.print(f"{key.id} for the project {project}: {', '.join(sorted(key.scopes))}")
    typer.echo(secret)


@keys_app.command("list")
def list_keys() -> None:
    """All keys, without their secrets."""
    with _database().read() as connection:
        found = keys.listing(connection)
    table = Table("key", "project", "name", "scopes", "made", "state")
    for key in found:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        state = "revoked" if key.revoked_at else "valid"
        table.add_row(key.id, key.project, key.name, ", ".join(sorted(key.scopes)), made, state)
    out.print(table)


@keys_app.command("revoke")
def revoke_key(key_id: str) -> None:
    """Make a key worthless, within a few seconds."""
    with _database().write() as connection:
        revoked = keys.revoke(connection, key_id)
    if not revoked:
        err.print(f"[red]Error:[/] no valid key {key_id}; `strop keys list` lists them.")
        raise typer.Exit(1)
    out.print(f"{key_id} is revoked.")
