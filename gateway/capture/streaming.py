"""The life of one stream: from vLLM's bytes to the client's, with the tokens taken out."""

from collections.abc import AsyncIterator
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


async def events(content: Body) -> AsyncIterator[bytes]:
    """The data of each server-sent event; `[DONE]` ends it and is not given.

    Raises:
        BrokenStream: the stream ended before `[DONE]`.
    """
    buffer = b""
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            event, buffer = buffer[:end], buffer[end + 2 :]
            for line in event.splitlines():
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data
    raise BrokenStream("vLLM closed the stream before its end")


async def relay(content: Body, capture: Capture) -> AsyncIterator[bytes]:
    """Events for the client, as they come.

    From the chunk that ends the last choice on, nothing is given: that is held back until the
    completion is durable, in `capture.held`.

    Raises:
        BrokenStream: the upstream broke off, or sent an error or no JSON.
    """
    async for data in events(content):
        chunk = _chunk(data)
        visible = capture.take_chunk(chunk)
        if not visible:
            continue
        event = encode(chunk)
        if capture.finished or not chunk.get("choices"):
            capture.held.append(event)
        else:
            yield event


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
