"""The `strop` command."""

import asyncio
import os
import subprocess
import sys
from typing import Annotated

import typer
from rich.markup import escape

from gateway.commands.doctor import doctor
from gateway.commands.export import data_app
from gateway.commands.keys import keys_app
from gateway.commands.langfuse import langfuse_app
from gateway.commands.log import group_app, reward, trajectory_app
from gateway.commands.policy import policy_app
from gateway.commands.replicas import replicas_app
from gateway.commands.retention import retention_app
from gateway.commands.shared import AsJson, err, opened, settings, show, shown_url
from gateway.commands.status import status
from gateway.commands.step import step_app
from gateway.commands.why import why
from gateway.settings import Settings

app = typer.Typer(
    help="A drop-in OpenAI API gateway that makes the model behind it better at its job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(policy_app, name="policy", no_args_is_help=True)
app.add_typer(step_app, name="step", no_args_is_help=True)
app.add_typer(keys_app, name="keys", no_args_is_help=True)
app.add_typer(langfuse_app, name="langfuse", no_args_is_help=True)
app.add_typer(data_app)
app.add_typer(trajectory_app, name="trajectory", no_args_is_help=True)
app.add_typer(group_app, name="group", no_args_is_help=True)
app.add_typer(replicas_app, name="replicas", no_args_is_help=True)
app.add_typer(retention_app, name="retention", no_args_is_help=True)
app.command()(status)
app.command()(doctor)
app.command()(why)
# A reward of -1 is no option.
app.command(context_settings={"ignore_unknown_options": True})(reward)


@app.command()
def up(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs.")] = False,
    trainer: Annotated[
        bool, typer.Option("--trainer/--no-trainer", help="Run the trainer too.")
    ] = True,
) -> None:
    """Start vLLM (unless STROP_REPLICAS names some), the gateway and the trainer."""
    from gateway.up import up as run_up

    chosen = settings()
    _refuse_open_door(chosen)
    raise typer.Exit(asyncio.run(run_up(chosen, trainer=trainer, verbose=verbose)))


@app.command()
def serve(
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Processes on the port (STROP_WORKERS).")
    ] = None,
) -> None:
    """Run the gateway alone, in front of the vLLM replicas in STROP_REPLICAS."""
    if workers is not None:
        # The processes read it from there.
        os.environ["STROP_WORKERS"] = str(workers)
    chosen = settings()
    _refuse_open_door(chosen)
    os.execv(sys.executable, [sys.executable, *gateway_arguments(chosen)])


def _refuse_open_door(settings: Settings) -> None:
    """Without keys only this machine may ask."""
    from gateway.auth import is_loopback
    from gateway.store import Database, keys

    if is_loopback(settings.host) or settings.admin_key:
        return
    database = Database(settings.url())
    database.migrate()
    with database.read() as connection:
        exist = keys.any_exist(connection)
    database.dispose()
    if not exist:
        err.print(
            f"[red]strop does not listen on {settings.host} without keys:[/] anybody could read "
            "and steer it. Make one with `strop keys create`, or set STROP_ADMIN_KEY.",
            highlight=False,
        )
        raise typer.Exit(2)


def gateway_arguments(settings: Settings) -> list[str]:
    """Arguments of the Python that runs the gateway."""
    several = ["--workers", str(settings.workers), "--timeout-worker-healthcheck", "30"]
    return [
        "-m",
        "uvicorn",
        "--factory",
        "gateway.app:serve",
        "--host",
        settings.host,
        "--port",
        str(settings.port),
        "--http",
        "gateway.protocol:Protocol",
        "--no-access-log",
        "--log-level",
        "info",
        "--timeout-graceful-shutdown",
        "30",
        "--timeout-keep-alive",
        str(settings.keep_alive),
        *(several if settings.workers > 1 else ()),
    ]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Run the trainer alone; arguments are those of `python -m trainer`."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "trainer", *context.args]))


@app.command()
def migrate(as_json: AsJson = False) -> None:
    """Bring the database's schema up to date."""
    from alembic.migration import MigrationContext

    with opened() as (chosen, database), database.read() as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
    where = shown_url(chosen.url())
    show(
        {"object": "schema", "database": where, "revision": revision},
        as_json,
        f"The schema of {escape(where)} is up to date ({revision}).",
    )


if __name__ == "__main__":
    app()
