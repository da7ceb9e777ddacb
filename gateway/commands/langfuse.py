"""`strop langfuse …`: what is still to be sent, and sending what was logged before."""

import threading
import time
from datetime import datetime
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.commands.shared import AsJson, busy, err, listing, opened, out, right, show, show_json
from gateway.settings import Settings
from gateway.store import Database, outbox
from gateway.store.models import DEFAULT_PROJECT

langfuse_app = typer.Typer(help="Traces and scores to Langfuse.")

_ROUND = 200
"""Trajectories that are noted in one transaction: requests wait for it."""

_DROPPED = 5000
"""Entries that are dropped in one transaction."""

Project = Annotated[str, typer.Option(help="The project of strop.")]


@langfuse_app.command("status")
def status(as_json: AsJson = False) -> None:
    """What is still to be sent, and what Langfuse refused."""
    with opened() as (settings, database), database.read() as connection:
        found = outbox.lag(connection, time.time())
    table = listing("project", "Langfuse", right("waiting"), "oldest", right("refused"))
    for lag in found:
        project = settings.langfuse.projects.get(lag.project)
        where = project.base_url if project else "not configured"
        oldest = f"{lag.oldest_seconds:.0f} s" if lag.waiting else ""
        table.add_row(lag.project, where, str(lag.waiting), oldest, str(lag.refused))
    names = ("project", "waiting", "refused", "oldest_seconds")
    show([{name: getattr(lag, name) for name in names} for lag in found], as_json, table)


@langfuse_app.command("retry")
def retry(project: Project = DEFAULT_PROJECT, as_json: AsJson = False) -> None:
    """Let what Langfuse refused be sent again."""
    with opened() as (_, database), database.write() as connection:
        count = outbox.retry_refused(connection, project)
    answer = {"object": "langfuse.retry", "project": project, "again": count}
    show(answer, as_json, f"{count} refused entries are sent again.")


@langfuse_app.command("forget")
def forget(
    project: Annotated[str, typer.Option(help="The project of strop.")], as_json: AsJson = False
) -> None:
    """Drop what waits for a project that has no Langfuse any more."""
    with opened() as (settings, database):
        if project in settings.langfuse.projects:
            err.print(
                f"[red]Error:[/] the project {escape(project)} has a Langfuse: what waits is sent "
                "there. Take its keys out of the settings first, and restart the gateways.",
                highlight=False,
            )
            raise typer.Exit(2)
        count = 0
        with busy("Dropping what waits"):
            while True:
                with database.write() as connection:
                    gone = outbox.forget_project(connection, project, _DROPPED)
                count += gone
                if gone < _DROPPED:
                    break
    answer = {"object": "langfuse.forget", "project": project, "dropped": count}
    show(answer, as_json, f"{count} entries of {escape(project)} are dropped.")


@langfuse_app.command("backfill")
def backfill(
    project: Project = DEFAULT_PROJECT,
    since: Annotated[
        datetime | None, typer.Option(help="Trajectories that began at this time or later.")
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="… and before this time.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until all of it is sent.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Send what was logged before Langfuse was configured, or what it has lost.

    What is there already is replaced by itself. Where no gateway runs, this command sends.
    """
    with opened() as (settings, database):
        if project not in settings.langfuse.projects:
            err.print(
                f"[red]Error:[/] the project {escape(project)} has no Langfuse. Set "
                "LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY and LANGFUSE_BASE_URL, or "
                "langfuse.projects in strop.toml.",
                highlight=False,
            )
            raise typer.Exit(2)
        count = _note(database, project, since, until)
        if not as_json:
            text = f"{count} completions and rewards of {escape(project)} are to be sent."
            out.print(text, highlight=False)
        refused = _watch(settings, database, project) if wait else None
    if as_json:
        found = {"project": project, "noted": count, "refused": refused}
        show_json({"object": "langfuse.backfill", **found})
    if refused:
        err.print(
            f"[red]Langfuse refused {refused}.[/] The log says why; "
            "`strop langfuse retry` sends them again.",
            highlight=False,
        )
        raise typer.Exit(1)


def _note(database: Database, project: str, since: datetime | None, until: datetime | None) -> int:
    count, after = 0, ""
    now = time.time()
    with database.write() as connection:
        outbox.trace_project(connection, project, now)
    with busy("Looking through the log"):
        while True:
            with database.write() as connection:
                made, last = outbox.backfill(
                    connection,
                    project,
                    since=since.timestamp() if since else 0.0,
                    until=until.timestamp() if until else float(2**62),
                    after=after,
                    limit=_ROUND,
                    now=now,
                )
            count += made
            if last is None:
                return count
            after = last


def _watch(settings: Settings, database: Database, project: str) -> int:
    """Wait until all is sent; how many were refused."""
    from gateway.tracing.channel import Channel
    from gateway.tracing.writes import Writes

    stop = threading.Event()
    channel = Channel(Writes(database), project, settings.langfuse, settings.public_url(), stop)
    # It sends only where no gateway holds the lease.
    thread = threading.Thread(target=channel.run, daemon=True)
    thread.start()
    columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=err, disable=not err.is_terminal) as progress:
            total = _waiting(database, project)
            task = progress.add_task("", total=total)
            while (left := _waiting(database, project)) > 0:
                total = max(total, left)
                progress.update(task, total=total, completed=total - left)
                time.sleep(0.2)
            progress.update(task, completed=total)
    finally:
        stop.set()
        thread.join(settings.langfuse.drain_seconds + 1.0)
    with database.read() as connection:
        found = outbox.lag(connection, time.time())
    return sum(lag.refused for lag in found if lag.project == project)


def _waiting(database: Database, project: str) -> int:
    with database.read() as connection:
        found = outbox.lag(connection, time.time())
    return sum(lag.waiting for lag in found if lag.project == project)
