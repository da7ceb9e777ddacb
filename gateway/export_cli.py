"""`strop export` and `strop import`: the log as files, and other logs into it.

Both work on the database itself; the gateway may run meanwhile or not.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import orjson
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from sqlalchemy import Connection, select

from gateway.settings import Settings
from gateway.store import Database, codec, export, rewards
from gateway.store.models import DEFAULT_PROJECT, Completion
from gateway.store.records import CapturedChoice, CapturedCompletion, Json, TrajectoryRef
from gateway.store.writer import Writer

data_app = typer.Typer()
err = Console(stderr=True)

_LINES = 200
"""Lines that are imported at once."""

_END_OF_TIME = 2**48 / 1000
"""Unix seconds that ids have room for."""


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
) -> None:
    """Write the log to a file, without holding it in memory."""
    kind = format or (Format.parquet if file.endswith(".parquet") else Format.jsonl)
    selection = export.Selection(project, policy, split, min_reward)
    if kind is Format.parquet and file == "-":
        raise _failed("Parquet is not written to the standard output. Name a file.")
    with _database() as database, _progress(export.count(database, selection)) as advance:
        if file == "-":
            _write_lines(database, selection, kind, sys.stdout.buffer, advance)
            return
        # What is under the name that was asked for is whole.
        partial = Path(f"{file}.partial")
        try:
            if kind is Format.parquet:
                export.write_parquet(database, selection, partial, advance)
            else:
                with partial.open("wb") as output:
                    _write_lines(database, selection, kind, output, advance)
            os.replace(partial, file)
        except (OSError, export.MissingPyarrow) as error:
            raise _failed(str(error)) from None
        finally:
            partial.unlink(missing_ok=True)


def _write_lines(
    database: Database,
    selection: export.Selection,
    kind: Format,
    output: BinaryIO,
    advance: Callable[[int], None],
) -> None:
    for piece in export.lines(database, selection, kind):
        output.write(piece)
        advance(export.BATCH)


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
) -> None:
    """Log chats from elsewhere: `{"messages": [..., the answer]}`, one a line.

    `tools`, `model`, `created`, `metadata` and `reward` are kept. Without tokens they are not
    trained on. A file may be imported again: what is there already is passed over.
    """
    try:
        lines = sys.stdin.buffer if file == "-" else Path(file).open("rb")  # noqa: SIM115
        made_at = time.time() if file == "-" else Path(file).stat().st_mtime
    except OSError as error:
        raise _failed(str(error)) from None
    with lines, _database() as database, _progress(None) as advance:
        work = _Import(database, project, policy, made_at, skip_invalid)
        try:
            asyncio.run(work.run(lines, advance))
        except InvalidLine as error:
            raise _failed(
                f"{error} {work.stored} chats were imported. Repair the line and import the file "
                "again, or pass over such lines with --skip-invalid."
            ) from None
    for problem in work.skipped[:10]:
        err.print(f"[yellow]Passed over:[/] {problem}", highlight=False)
    err.print(
        f"{work.stored} chats were imported, {work.known} were there already, "
        f"{len(work.skipped)} lines were passed over.",
        highlight=False,
    )


class InvalidLine(ValueError):
    """A line is no chat; the message says which line and why."""


@dataclass(slots=True)
class _Chat:
    """A line of a file, ready to be stored."""

    captured: CapturedCompletion
    reward: float | None


@dataclass(slots=True)
class _Import:
    """One import, and how far it has come."""

    database: Database
    project: str
    policy: str
    made_at: float
    """Unix seconds, for lines that name no time."""
    skip_invalid: bool
    stored: int = 0
    known: int = 0
    skipped: list[str] = field(default_factory=list)

    async def run(self, lines: Iterable[bytes], advance: Callable[[int], None]) -> None:
        """Store all lines.

        Raises:
            InvalidLine: and lines that cannot be read are not to be skipped.
        """
        writer = Writer(self.database)
        writer.start()
        try:
            chats = self._chats(lines)
            while batch := list(islice(chats, _LINES)):
                await self._store(writer, batch)
                advance(len(batch))
        finally:
            await writer.close()

    def _chats(self, lines: Iterable[bytes]) -> Iterator[_Chat]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield self._chat(line.strip())
            except InvalidLine as error:
                problem = f"Line {number}: {error}"
                if not self.skip_invalid:
                    raise InvalidLine(problem) from None
                self.skipped.append(problem)

    def _chat(self, line: bytes) -> _Chat:
        try:
            chat = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InvalidLine(f"it is not JSON: {error}.") from None
        if not isinstance(chat, dict):
            raise InvalidLine("it is no JSON object.")
        messages, answer = _messages(chat.get("messages"))
        reward, metadata = chat.get("reward"), chat.get("metadata")
        created: Any = chat.get("created", chat.get("created_at", self.made_at))
        model, tools = chat.get("model", self.policy), chat.get("tools")
        if reward is not None and not _is_number(reward):
            raise InvalidLine("`reward` must be a finite number.")
        if not _is_number(created) or not 0 <= created < _END_OF_TIME:
            raise InvalidLine("`created` must be a number of Unix seconds.")
        if not isinstance(model, str) or not isinstance(metadata, dict | None):
            raise InvalidLine("`model` must be text, and `metadata` an object.")
        # Laid out as every id, and the same for the same line, so that it is not logged twice.
        same = codec.digest(self.project.encode() + b"\n" + line)[:10].hex()
        name = f"{int(created * 1000):012x}{same}"
        first = next(n for n, m in enumerate([*messages, answer]) if m["role"] == "assistant")
        task = codec.digest_json([messages[:first], tools])[:10].hex()
        captured = CapturedCompletion(
            id=f"chatcmpl-{name}",
            project=self.project,
            trajectory=TrajectoryRef(f"traj-{name}", f"import-{task}", "import"),
            policy=model,
            version=None,
            trained=False,
            messages=messages,
            request={"model": model, **({"tools": tools} if tools else {})},
            stream=False,
            created_at=float(created),
            finished_at=float(created),
            client_metadata=metadata or None,
            reason="no_token_ids",
            response={
                "id": f"chatcmpl-{name}",
                "object": "chat.completion",
                "created": int(created),
                "model": model,
                "choices": [{"index": 0, "message": answer, "finish_reason": "stop"}],
            },
            choices=[CapturedChoice(0, "stop")],
        )
        return _Chat(captured, reward)

    async def _store(self, writer: Writer, batch: list[_Chat]) -> None:
        ids = [chat.captured.id for chat in batch]
        with self.database.read() as connection:
            query = select(Completion.id).where(Completion.id.in_(ids))
            there = set(connection.execute(query).scalars())
        fresh = {c.captured.id: c.captured for c in batch if c.captured.id not in there}
        await asyncio.gather(*(writer.store(captured) for captured in fresh.values()))
        posted = [
            rewards.NewReward(
                chat.reward,
                completion_id=chat.captured.id,
                source="import",
                idempotency_key=f"import-{chat.captured.id}",
            )
            for chat in batch
            if chat.reward is not None
        ]

        def post(connection: Connection) -> None:
            rewards.post(connection, self.project, posted)

        if posted:
            await writer.run(post)
        self.stored += len(fresh)
        self.known += len(batch) - len(fresh)


def _messages(messages: Any) -> tuple[list[Json], Json]:
    """The messages before the answer, and the answer."""
    if not isinstance(messages, list) or len(messages) < 2:
        raise InvalidLine("`messages` must be a list of at least a message and its answer.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidLine(f"messages[{index}] must be an object with a `role`.")
    if messages[-1]["role"] != "assistant":
        raise InvalidLine("the last of `messages` must be the answer, of the role assistant.")
    return messages[:-1], messages[-1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


@contextmanager
def _database() -> Iterator[Database]:
    try:
        database = Database(Settings().url())
    except ValidationError as error:
        raise _failed(f"The settings are wrong: {error.errors()[0]['msg']}.") from None
    try:
        database.migrate()
        yield database
    finally:
        database.dispose()


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on the standard error, if that is a terminal."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


def _failed(message: str) -> typer.Exit:
    err.print(f"[red]Error:[/] {message}", highlight=False)
    return typer.Exit(1)
