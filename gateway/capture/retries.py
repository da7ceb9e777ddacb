"""Answers that were logged and never reached their client, kept for its retry.

An SDK that lost its connection sends the same body again and says so. Sampling once more would log
an episode twice, so it gets the answer that is there. An agent that repeats a request on purpose
sends neither mark, and gets a fresh sample.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from gateway.store import codec

Json = dict[str, Any]

_KEPT_SECONDS = 600.0


class Retries:
    """Undelivered answers by project, idempotency key and body; the oldest go first."""

    def __init__(self, size: int = 1_000):
        self._size = size
        self._answers: OrderedDict[tuple[str, str | None, bytes], tuple[float, Json]] = (
            OrderedDict()
        )

    def keep(self, project: str, headers: Mapping[str, str], body: Json, response: Json) -> None:
        """Remember an answer whose client was gone."""
        place = self._place(project, headers, body)
        self._answers[place] = (time.monotonic(), response)
        self._answers.move_to_end(place)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def take(self, project: str, headers: Mapping[str, str], body: Json) -> Json | None:
        """The answer to a request that says it is a retry; each is given once."""
        if not self._answers or not _is_retry(headers):
            return None
        kept_at, response = self._answers.pop(
            self._place(project, headers, body), (-_KEPT_SECONDS, {})
        )
        return response if time.monotonic() - kept_at < _KEPT_SECONDS and response else None

    def _place(
        self, project: str, headers: Mapping[str, str], body: Json
    ) -> tuple[str, str | None, bytes]:
        return project, headers.get("idempotency-key"), codec.digest_json(body)


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
