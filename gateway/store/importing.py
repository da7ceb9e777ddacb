"""Chats from elsewhere into the log: `{"messages": [..., the answer]}`, one a line.

They have no tokens, so they are never trained on. A line is stored under an id that is made from it
and its time: what is there already is passed over, and a file can be imported again.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any

import orjson
from sqlalchemy import Connection, select

from gateway.store import codec, rewards
from gateway.store.database import Database
from gateway.store.models import Completion
from gateway.store.records import CapturedChoice, CapturedCompletion, Json, TrajectoryRef
from gateway.store.writer import Writer

_LINES = 200
"""Lines that are imported at once."""

END_OF_TIME = 2**48 / 1000
"""Unix seconds that ids have room for."""


class InvalidLine(ValueError):
    """A line is no chat; the message says which line and why."""


@dataclass(slots=True)
class Chat:
    """A line of a file, ready to be stored."""

    captured: CapturedCompletion
    reward: float | None


@dataclass(slots=True)
class ChatImport:
    """One import, and how far it has come."""

    database: Database
    project: str
    policy: str
    made_at: float | None
    """Unix seconds, for lines that name no time; None: each must name its own."""
    skip_invalid: bool
    stored: int = 0
    known: int = 0
    bytes_read: int = 0
    skipped: list[str] = field(default_factory=list)

    async def run(
        self,
        writer: Writer,
        lines: Iterable[bytes],
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Store all lines.

        Args:
            advance: called with the bytes that were stored, or passed over, since the last call.

        Raises:
            InvalidLine: and lines that cannot be read are not to be skipped.
        """
        chats = self.chats(lines)
        told = self.bytes_read
        while batch := await asyncio.to_thread(lambda: list(islice(chats, _LINES))):
            await self._store(writer, batch)
            advance(self.bytes_read - told)
            told = self.bytes_read

    def chats(self, lines: Iterable[bytes]) -> Iterator[Chat]:
        """What the lines hold.

        Raises:
            InvalidLine: as above.
        """
        for number, line in enumerate(lines, 1):
            self.bytes_read += len(line)
            if not line.strip():
                continue
            try:
                yield self._chat(line.strip())
            except InvalidLine as error:
                problem = f"Line {number}: {error}"
                if not self.skip_invalid:
                    raise InvalidLine(problem) from None
                self.skipped.append(problem)

    def _chat(self, line: bytes) -> Chat:
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
        if created is None:
            raise InvalidLine("it names no time: `created`, in Unix seconds.")
        if not _is_number(created) or not 0 <= created < END_OF_TIME:
            raise InvalidLine("`created` must be a number of Unix seconds.")
        if not isinstance(model, str) or not isinstance(metadata, dict | None):
            raise InvalidLine("`model` must be text, and `metadata` an object.")
        if not isinstance(tools, list | None):
            raise InvalidLine("`tools` must be a list.")
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
        return Chat(captured, reward)

    async def _store(self, writer: Writer, batch: list[Chat]) -> None:
        there = await asyncio.to_thread(self._known, [chat.captured.id for chat in batch])
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

    def _known(self, ids: list[str]) -> set[str]:
        with self.database.read() as connection:
            query = select(Completion.id).where(Completion.id.in_(ids))
            return set(connection.execute(query).scalars())


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
