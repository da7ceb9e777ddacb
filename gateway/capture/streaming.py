"""The life of one stream: from vLLM's bytes to the client's, with the tokens taken out."""

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

import orjson

from gateway.capture.tokens import Capture, Json

DONE = b"data: [DONE]\n\n"


class Body(Protocol):
    """Where the pieces of an answer come from."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """The pieces as they arrive."""


class BrokenStream(Exception):
    """The upstream ended without its last event, or sent what is not an event."""


async def relay(content: Body, capture: Capture) -> AsyncIterator[bytes]:
    """Events for the client, as they come; those that came together are given together.

    From the chunk that ends the last choice on, nothing is given: that is held back until the
    completion is durable, in `capture.held`.

    Raises:
        BrokenStream: the upstream broke off before `[DONE]`, or sent an error or no JSON.
    """
    buffer = b""
    async for piece in content.iter_any():
        *events, buffer = (buffer + piece if buffer else piece).split(b"\n\n")
        shown: list[bytes] = []
        ended, failure = False, None
        try:
            for event in events:
                for data in _data(event):
                    if data == b"[DONE]":
                        ended = True
                        break
                    _take(data, capture, shown)
                if ended:
                    break
        except Exception as error:
            # After what came before it.
            failure = error
        if shown:
            yield shown[0] if len(shown) == 1 else b"".join(shown)
        if failure is not None:
            raise failure
        if ended:
            return
    raise BrokenStream("vLLM closed the stream before its end")


def _data(event: bytes) -> Iterable[bytes]:
    """The data of one server-sent event."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return (event[6:].strip(),)
    return [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]


def _take(data: bytes, capture: Capture, shown: list[bytes]) -> None:
    """Take one chunk in, and add to `shown` what the client may see of it now."""
    chunk = _chunk(data)
    if not capture.take_chunk(chunk):
        return
    event = encode(chunk)
    if capture.finished or not chunk.get("choices"):
        capture.held.append(event)
    else:
        shown.append(event)


def encode(chunk: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _chunk(data: bytes) -> Json:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise BrokenStream("vLLM sent an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise BrokenStream("vLLM sent an event that is not a JSON object")
    if "error" in chunk:
        error = chunk["error"]
        message = error.get("message") if isinstance(error, dict) else error
        raise BrokenStream(f"vLLM failed in the middle of the stream: {message}")
    return chunk
