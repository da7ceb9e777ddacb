"""`strop export` and `strop import`: the log as files, and other logs into it.

Both work on the database itself; the gateway may run meanwhile or not.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer
from rich.markup import escape

from gateway.commands.shared import AsJson, err, failed, opened, progress, show_json
from gateway.store import Database, export
from gateway.store.importing import ChatImport, InvalidLine
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.writer import Writer

data_app = typer.Typer()


class Format(StrEnum):
    """Formats of an export."""

    jsonl = "jsonl"
    openai = "openai"
    parquet = "parquet"


class Split(StrEnum):
    """Splits of trajectories."""

    train = "train"
    eval = "eval"


Project = Annotated[str, typer.Option(help="The project whose log it is.")]


@data_app.command("export")
def export_log(
    file: Annotated[str, typer.Argument(help="Where to; - is the standard output.")],
    format: Annotated[
        Format | None,
        typer.Option(
            help="jsonl: chats with rewards. openai: OpenAI's fine-tuning format. parquet: every "
            "answer with its exact tokens. By the file's ending, if not given."
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Of this policy alone.")] = None,
    split: Annotated[Split | None, typer.Option(help="Of this split alone.")] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Leave out what is worth less, or is not rewarded.")
    ] = None,
    project: Project = DEFAULT_PROJECT,
    as_json: AsJson = False,
) -> None:
    """Write the log to a file, without holding it in memory."""
    kind = format or (Format.parquet if file.endswith(".parquet") else Format.jsonl)
    if file == "-" and kind is Format.parquet:
        raise failed("Parquet is not written to the standard output. Name a file.")
    if file == "-" and as_json:
        raise failed("With - the standard output is the log itself. Name a file for --json.")
    selection = export.Selection(project, policy, split, min_reward)
    with (
        opened() as (_, database),
        progress("Writing", export.count(database, selection)) as advance,
    ):
        written = _write(database, selection, kind, file, advance)
    if as_json:
        found = {"file": file, "format": kind, "lines": written, "project": project}
        show_json({"object": "export", **found})
    elif file != "-":
        err.print(f"{written} lines were written to {escape(file)}.", highlight=False)


def _write(
    database: Database,
    selection: export.Selection,
    kind: Format,
    file: str,
    advance: Callable[[int], None],
) -> int:
    """How many lines, or rows of a table, were written."""
    if file == "-":
        return _write_lines(database, selection, kind, sys.stdout.buffer, advance)
    # What is under the name that was asked for is whole.
    partial = Path(f"{file}.partial")
    try:
        if kind is Format.parquet:
            written = export.write_parquet(database, selection, partial, advance)
        else:
            with partial.open("wb") as output:
                written = _write_lines(database, selection, kind, output, advance)
        os.replace(partial, file)
    except (OSError, export.MissingPyarrow) as error:
        raise failed(str(error)) from None
    finally:
        partial.unlink(missing_ok=True)
    return written


def _write_lines(
    database: Database,
    selection: export.Selection,
    kind: Format,
    output: BinaryIO,
    advance: Callable[[int], None],
) -> int:
    written = 0
    for piece in export.lines(database, selection, kind):
        output.write(piece)
        written += piece.count(b"\n")
        advance(export.BATCH)
    return written


@data_app.command("import")
def import_log(
    file: Annotated[str, typer.Argument(help="JSON lines; - is the standard input.")],
    policy: Annotated[
        str, typer.Option(help="The policy to log lines under that name no `model`.")
    ] = "imported",
    skip_invalid: Annotated[
        bool, typer.Option("--skip-invalid", help="Go on after a line that cannot be read.")
    ] = False,
    project: Project = DEFAULT_PROJECT,
    as_json: AsJson = False,
) -> None:
    """Log chats from elsewhere: `{"messages": [..., the answer]}`, one a line.

    `tools`, `model`, `created`, `metadata` and `reward` are kept. Without tokens they are not
    trained on. A file may be imported again: what is there already is passed over.
    """
    try:
        lines = sys.stdin.buffer if file == "-" else Path(file).open("rb")  # noqa: SIM115
        about = None if file == "-" else Path(file).stat()
    except OSError as error:
        raise failed(str(error)) from None
    made_at = about.st_mtime if about else time.time()
    size = about.st_size if about else None
    with lines, opened() as (_, database), progress("Reading", size) as advance:
        work = ChatImport(database, project, policy, made_at, skip_invalid)
        try:
            asyncio.run(_import(work, lines, advance))
        except InvalidLine as error:
            raise failed(
                f"{error} {work.stored} chats were imported. Repair the line and import the file "
                "again, or pass over such lines with --skip-invalid."
            ) from None
    if as_json:
        show_json(_told(work))
        return
    for problem in work.skipped[:10]:
        err.print(f"[yellow]Passed over:[/] {escape(problem)}", highlight=False)
    err.print(
        f"{work.stored} chats were imported, {work.known} were there already, "
        f"{len(work.skipped)} lines were passed over.",
        highlight=False,
    )


async def _import(work: ChatImport, lines: Iterable[bytes], advance: Callable[[int], None]) -> None:
    writer = Writer(work.database)
    writer.start()
    try:
        await work.run(writer, lines, advance)
    finally:
        await writer.close()


def _told(work: ChatImport) -> dict[str, Any]:
    return {
        "object": "import",
        "project": work.project,
        "imported": work.stored,
        "known": work.known,
        "skipped": len(work.skipped),
        "problems": work.skipped[:10],
    }
