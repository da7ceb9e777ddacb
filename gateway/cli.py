"""The `strop` command."""

import asyncio
import os
import subprocess
import sys
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from gateway.commands.doctor import doctor
from gateway.commands.log import group_app, reward, trajectory_app
from gateway.commands.shared import URL, AsJson, PolicyName, Url, ask, err, out, show_json
from gateway.commands.status import status
from gateway.commands.why import why
from gateway.export_cli import data_app
from gateway.keys_cli import keys_app
from gateway.langfuse_cli import langfuse_app
from gateway.life_cli import register, step_app
from gateway.settings import Settings

app = typer.Typer(
    help="A drop-in OpenAI API gateway that makes the model behind it better at its job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
policy_app = typer.Typer(help="What is being trained, its versions, and the way back.")
app.add_typer(policy_app, name="policy", no_args_is_help=True)
app.add_typer(step_app, name="step", no_args_is_help=True)
app.add_typer(keys_app, name="keys", no_args_is_help=True)
app.add_typer(langfuse_app, name="langfuse", no_args_is_help=True)
app.add_typer(data_app)
app.add_typer(trajectory_app, name="trajectory", no_args_is_help=True)
app.add_typer(group_app, name="group", no_args_is_help=True)
app.command()(status)
app.command()(doctor)
app.command()(why)
# A reward of -1 is no option.
app.command(context_settings={"ignore_unknown_options": True})(reward)


def _settings() -> Settings:
    try:
        return Settings()
    except ValidationError as error:
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            what = f"The setting {name} is wrong:" if name else "The settings are wrong:"
            err.print(f"[red]{what}[/] {item['msg']}", highlight=False)
        raise typer.Exit(2) from None


@app.command()
def up(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all logs.")] = False,
    trainer: Annotated[
        bool, typer.Option("--trainer/--no-trainer", help="Run the trainer too.")
    ] = True,
) -> None:
    """Start vLLM (unless STROP_REPLICAS names some), the gateway and the trainer."""
    from gateway.up import up as run_up

    settings = _settings()
    _refuse_open_door(settings)
    raise typer.Exit(asyncio.run(run_up(settings, trainer=trainer, verbose=verbose)))


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
    settings = _settings()
    _refuse_open_door(settings)
    os.execv(sys.executable, [sys.executable, *gateway_arguments(settings)])


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
        "--no-access-log",
        "--log-level",
        "info",
        "--timeout-graceful-shutdown",
        "30",
        *(several if settings.workers > 1 else ()),
    ]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(context: typer.Context) -> None:
    """Run the trainer alone; arguments are those of `python -m trainer`."""
    raise typer.Exit(subprocess.call([sys.executable, "-m", "trainer", *context.args]))


@app.command()
def migrate() -> None:
    """Bring the database's schema up to date."""
    from gateway.store import Database

    settings = _settings()
    Database(settings.url()).migrate()
    out.print(f"The schema of {settings.url().split('@')[-1]} is up to date.", highlight=False)


@policy_app.command("list")
def list_policies(url: Url = URL, as_json: AsJson = False) -> None:
    """All policies."""
    answer = ask(url, "/v1/policies")
    if as_json:
        show_json(answer)
        return
    table = Table("policy", "serves", "trains from", "loaded", "state", "base model")
    for policy in answer["data"]:
        table.add_row(
            policy["name"],
            f"@{policy['alias']}",
            f"@{policy['head']}",
            " ".join(f"@{number}" for number in policy["loaded"]),
            policy["state"],
            policy["base_model"],
        )
    out.print(table)


@policy_app.command("show")
def show_policy(name: PolicyName, url: Url = URL, as_json: AsJson = False) -> None:
    """A policy's versions, with the results of their probes."""
    policy = ask(url, f"/v1/policies/{name}")
    versions = ask(url, f"/v1/policies/{name}/versions")["data"]
    if as_json:
        show_json({**policy, "versions": versions})
        return
    out.print(
        f"{name} serves @{policy['alias']}, trains from @{policy['head']}, "
        f"base model {policy['base_model']}",
        highlight=False,
    )
    if policy["state"] == "paused":
        out.print(f"It is paused: {policy['state_reason']}", highlight=False)
    if policy["canary"] is not None:
        trial = policy["canary"]
        out.print(
            f"@{trial['version']} is on trial with {trial['share']:.0%} of the new trajectories.",
            highlight=False,
        )
    if policy["learning_rate_factor"] != 1:
        out.print(f"Its learning rate is {policy['learning_rate_factor']:g} times the settings'.")
    table = Table("version", "parent", "state", "step", "probe")
    for version in versions:
        table.add_row(
            f"@{version['number']}",
            f"@{version['parent']}" if version["parent"] is not None else "",
            version["state"],
            str(version["step_id"] or ""),
            _probe(version["probe_result"]),
        )
    out.print(table)


def _probe(result: dict[str, Any] | None) -> str:
    if not result:
        return ""
    if "error" in result:
        return str(result["error"])
    numbers: dict[str, float] = next(iter(result["replicas"].values()), {})
    if "mean_difference" not in numbers:
        return ""
    text = f"{numbers['mean_difference']:.1e} nats from the trainer's"
    if "mean_difference_to_previous" in numbers:
        text += f", {numbers['mean_difference_to_previous']:.1e} from the version before"
    return text


@policy_app.command("rollback")
def roll_back(name: PolicyName, version: int, url: Url = URL, as_json: AsJson = False) -> None:
    """Serve an earlier version now, and let training go on from it."""
    what = f"Loading and proving @{version} on every replica"
    policy = ask(url, f"/v1/policies/{name}/rollback", {"version": version}, what=what)
    if as_json:
        show_json(policy)
        return
    out.print(f"{name} serves @{policy['alias']} now and trains from it.", highlight=False)


register(policy_app)


if __name__ == "__main__":
    app()
