"""`strop keys …`: made on the machine of the database, for there is no key to ask with yet."""

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape

from gateway.commands.shared import AsJson, err, listing, opened, show, show_json, when
from gateway.store import keys
from gateway.store.models import DEFAULT_PROJECT

keys_app = typer.Typer(help="Who may ask, and for what.")


def _shown(key: keys.Key) -> dict[str, Any]:
    return {"object": "key", **asdict(key), "scopes": sorted(key.scopes)}


@keys_app.command("create")
def create_key(
    project: Annotated[str, typer.Option(help="The project whose rows it sees.")] = DEFAULT_PROJECT,
    scope: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(keys.SCOPES)}.")
    ] = "inference,reward,read",
    name: Annotated[str, typer.Option(help="To tell it from others.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown this once; only its digest is kept."""
    scopes = [part.strip() for part in scope.split(",") if part.strip()]
    try:
        with opened() as (_, database), database.write() as connection:
            key, secret = keys.create(connection, project, name, scopes)
    except ValueError as error:
        err.print(f"[red]Error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        show_json({**_shown(key), "key": secret})
        return
    err.print(f"{key.id} for the project {escape(project)}: {', '.join(sorted(key.scopes))}")
    # Alone on the standard output, so that a script can take it.
    typer.echo(secret)


@keys_app.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """All keys, without their secrets."""
    with opened() as (_, database), database.read() as connection:
        found = keys.listing(connection)
    table = listing("key", "project", "name", "scopes", "made", "state")
    for key in found:
        state = "revoked" if key.revoked_at else "valid"
        scopes = ", ".join(sorted(key.scopes))
        table.add_row(
            key.id, escape(key.project), escape(key.name), scopes, when(key.created_at), state
        )
    none = "There is none yet: `strop keys create` makes one."
    answer = {"object": "list", "data": [_shown(key) for key in found]}
    show(answer, as_json, table if found else none)


@keys_app.command("revoke")
def revoke_key(key_id: str, as_json: AsJson = False) -> None:
    """Make a key worthless, within a few seconds."""
    with opened() as (_, database), database.write() as connection:
        revoked = keys.revoke(connection, key_id)
    if not revoked:
        err.print(f"[red]Error:[/] no valid key {escape(key_id)}; `strop keys list` lists them.")
        raise typer.Exit(1)
    show({"object": "key", "id": key_id, "revoked": True}, as_json, f"{key_id} is revoked.")
