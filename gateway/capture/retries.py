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
from collections.abc import Mapping
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


class Retries:
    """Undelivered answers by project, idempotency key and body."""

    def __init__(self, database: Database, writer: Writer):
        self._database = database
        self._writer = writer
        self._remembered: OrderedDict[tuple[str, bytes], tuple[float, Json]] = OrderedDict()
        """Those that could not be noted, the oldest first."""

    async def keep(
        self,
        project: str,
        headers: Mapping[str, str],
        body: Json,
        completion_id: str,
        response: Json,
    ) -> None:
        """Note that a client was gone before its answer was."""
        place, now = place_of(headers, body), time.time()

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
            self._remembered[project, place] = (now, response)
            self._remembered.move_to_end((project, place))
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)

    async def take(self, project: str, headers: Mapping[str, str], body: Json) -> Json | None:
        """The answer to a request that says it is a retry; each is given once.

        Raises:
            ApiError: 429, too much is being written.
        """
        if not _is_retry(headers):
            return None
        place, now = place_of(headers, body), time.time()
        kept_at, response = self._remembered.pop((project, place), (0.0, {}))
        if response and now - kept_at < undelivered.KEPT_SECONDS:
            return response
        try:
            # Most retries are of what never got an answer: they need not wait for a commit.
            if not await asyncio.to_thread(self._is_kept, project, place, now):
                return None
            taken = await self._writer.run(lambda c: undelivered.take(c, project, place, now))
            return await asyncio.to_thread(self._response, project, taken) if taken else None
        except QueueFull as error:
            raise ApiError(429, f"{error}. Try again in a second.", retry_after=1) from None
        except OperationalError as error:
            if not connection_lost(error):
                raise
            return None

    def _is_kept(self, project: str, place: bytes, now: float) -> bool:
        with self._database.read() as connection:
            return undelivered.is_kept(connection, project, place, now)

    def _response(self, project: str, completion_id: str) -> Json | None:
        with self._database.read() as connection:
            found = queries.completion(connection, project, completion_id)
        return found.response if found is not None else None


def place_of(headers: Mapping[str, str], body: Json) -> bytes:
    """The same for a request and its retry, and for no other."""
    key = headers.get("idempotency-key", "")
    return sha256(key.encode() + b"\0" + codec.digest_json(body)).digest()


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
