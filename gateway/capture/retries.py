"""Answers that were logged and never reached their client, kept for its retry.

An SDK that lost its connection sends the same body again and says so. Sampling once more would log
an episode twice, so it gets the answer that is there. An agent that repeats a request on purpose
sends neither mark, and gets a fresh sample.

The retry may come to any process and any gateway, so what was not delivered is noted in the
database. While that is away, a process remembers what it answered itself.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from gateway.errors import ApiError
from gateway.store import Database, codec, queries, undelivered
from gateway.store.journal import connection_lost
from gateway.store.writer import QueueFull, Writer

log = logging.getLogger("strop.retries")

Json = dict[str, Any]

_REMEMBERED = 1_000
_AGAIN_SECONDS = (0.02, 0.1, 0.4)


@dataclass(frozen=True, slots=True)
class Logged:
    """An answer that is in the log, with what the headers of its response say."""

    response: Json
    trajectory_id: str
    policy: str
    version: int | None

    @property
    def shown(self) -> str | None:
        """The version by the name that clients see; None for a provider's."""
        return f"{self.policy}@{self.version}" if self.version is not None else None


class Retries:
    """Undelivered answers by project, idempotency key and body.

    A request that is logged as several completions has as many parts, each with its own answer.
    """

    def __init__(self, database: Database, writer: Writer):
        self._database = database
        self._writer = writer
        self._remembered: OrderedDict[tuple[str, bytes], tuple[float, Logged]] = OrderedDict()
        """Those that could not be noted, the oldest first."""

    async def keep(
        self,
        project: str,
        headers: Mapping[str, str],
        body: Json,
        answers: Sequence[Logged | None],
    ) -> None:
        """Note that a client was gone before the answers to the parts of its request were.

        Args:
            answers: one for each part; None where it has no whole one.
        """
        places = places_of(headers, body, len(answers))
        await asyncio.gather(
            *(
                self._keep(project, place, answer)
                for place, answer in zip(places, answers, strict=True)
                if answer is not None
            )
        )

    async def _keep(self, project: str, place: bytes, answer: Logged) -> None:
        completion_id, now = answer.response["id"], time.time()

        def note(connection: Connection) -> None:
            undelivered.keep(connection, project, place, completion_id, now)

        try:
            for seconds in _AGAIN_SECONDS:
                try:
                    await self._writer.run(note)
                    return
                except IntegrityError:
                    # The client was gone before the completion is in the database: a process
                    # that commits for several gets it by another way.
                    await asyncio.sleep(seconds)
            await self._writer.run(note)
        except Exception as error:
            # The database is away, or the completion is still in a journal.
            log.warning("%s is kept for a retry in memory only: %s", completion_id, error)
            self._remembered[project, place] = (now, answer)
            self._remembered.move_to_end((project, place))
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)

    async def take(
        self, project: str, headers: Mapping[str, str], body: Json, parts: int = 1
    ) -> list[Logged | None]:
        """The answers to the parts of a request that says it is a retry; each is given once.

        Raises:
            ApiError: 429, too much is being written.
        """
        if not _is_retry(headers):
            return [None] * parts
        places, now = places_of(headers, body, parts), time.time()
        found = self._recall(project, places, now)
        missing = [place for place in places if place not in found]
        try:
            # Most retries are of what never got an answer: they need not wait for a commit.
            known = await asyncio.to_thread(self._any_kept, project, missing, now)
            if known:
                taken = await self._writer.run(
                    lambda connection: undelivered.take(connection, project, missing, now)
                )
                found.update(await asyncio.to_thread(self._read, project, taken))
        except QueueFull as error:
            raise ApiError(429, f"{error}. Try again in a second.", retry_after=1) from None
        except OperationalError as error:
            if not connection_lost(error):
                raise
        return [found.get(place) for place in places]

    def _recall(self, project: str, places: list[bytes], now: float) -> dict[bytes, Logged]:
        found = {}
        for place in places:
            kept_at, answer = self._remembered.pop((project, place), (0.0, None))
            if answer is not None and now - kept_at < undelivered.KEPT_SECONDS:
                found[place] = answer
        return found

    def _any_kept(self, project: str, places: list[bytes], now: float) -> bool:
        with self._database.read() as connection:
            return undelivered.any_kept(connection, project, places, now)

    def _read(self, project: str, taken: dict[bytes, str]) -> dict[bytes, Logged]:
        with self._database.read() as connection:
            stored = {
                place: queries.completion(connection, project, id) for place, id in taken.items()
            }
        return {
            place: Logged(item.response, item.trajectory_id, item.policy, item.version)
            for place, item in stored.items()
            if item is not None and item.response is not None
        }


def places_of(headers: Mapping[str, str], body: Json, parts: int = 1) -> list[bytes]:
    """For each part of a request: the same for it and its retry, and for no other."""
    key = headers.get("idempotency-key", "")
    whole = key.encode() + b"\0" + codec.digest_json(body)
    return [sha256(whole + (b"\0%d" % part if part else b"")).digest() for part in range(parts)]


def _is_retry(headers: Mapping[str, str]) -> bool:
    if headers.get("idempotency-key"):
        return True
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and int(count) > 0


def as_chunks(response: Json) -> list[Json]:
    """A whole response as the chunks of a stream: all it says, how it ended, and usage."""
    base = {
        "id": response["id"],
        "object": "chat.completion.chunk",
        "created": response.get("created"),
        "model": response.get("model"),
    }
    chunks: list[Json] = []
    for choice in response["choices"]:
        index, message = choice["index"], dict(choice["message"])
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        said = {"index": index, "delta": message, "logprobs": choice.get("logprobs")}
        ended = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
        chunks.append({**base, "choices": [{**said, "finish_reason": None}]})
        chunks.append({**base, "choices": [ended]})
    chunks.append({**base, "choices": [], "usage": response.get("usage")})
    return chunks
