"""Answering in another surface's format what `gateway.api.chat` answers in its own.

The chat endpoint does all the work and sends its answer to a `Translated`, which hands on what the
surface makes of it: JSON as a whole, a stream chunk by chunk as it comes. Nothing is held back
here, so what chat sends only after the commit reaches the client only after the commit.
"""

import asyncio
import importlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import Any, Protocol

import orjson
from starlette.types import Message, Send

from gateway.backends.vllm import error_message
from gateway.errors import ApiError
from gateway.http import send_body, send_whole

log = logging.getLogger("strop.translate")

Json = dict[str, Any]

_DONE = b"[DONE]"


class Surface(Protocol):
    """What one surface makes of a chat answer. Events are JSON objects with a `type`."""

    def answer(self, chat: Json) -> Json:
        """The body for a chat completion's body."""

    def chunk(self, chunk: Json) -> list[Json]:
        """The events that a chunk of a chat stream amounts to."""

    def end(self) -> list[Json]:
        """The events after the last chunk."""

    def failed(self, error: ApiError) -> list[Json]:
        """The events that end a stream which broke off."""

    def error(self, error: ApiError) -> Json:
        """The body of an error."""


async def litellm(module: str) -> Any:
    """A module of LiteLLM.

    Importing it takes seconds, so it is done when it is first needed, and off the event loop.

    Raises:
        ApiError: 501, it is not installed.
    """
    # Not from sys.modules, which has a module from the moment on that its import begins.
    if module not in _loaded:
        _loaded[module] = await asyncio.to_thread(_import, f"litellm.{module}")
    return _loaded[module]


_loaded: dict[str, Any] = {}


def _import(name: str) -> Any:
    # Else it fetches a price list from the internet while it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    try:
        package = importlib.import_module("litellm")
        found = importlib.import_module(name)
    except ImportError as error:
        raise ApiError(
            501,
            f"This route needs LiteLLM, which could not be imported ({error}). Install it with: "
            "pip install 'strop[providers]'",
            code="litellm_missing",
        ) from error
    package.telemetry = False  # type: ignore[attr-defined]
    # It prints advice about providers, of which it is asked for none.
    package.suppress_debug_info = True  # type: ignore[attr-defined]
    return found


class Translated:
    """A `send` for `gateway.api.chat.answer`."""

    def __init__(self, send: Send, surface: Surface):
        self._send = send
        self._surface = surface
        self._start: Message = {}
        self._streaming = False
        self._broken = False

    async def __call__(self, message: Message) -> None:
        """Take one ASGI message of the chat endpoint."""
        if message["type"] == "http.response.start":
            self._start = message
            headers = dict(message["headers"])
            self._streaming = headers[b"content-type"].startswith(b"text/event-stream")
            if self._streaming:
                await self._send(message)
        elif self._streaming:
            body = b"".join(encode(event) for event in self._events(message["body"]))
            if body or not message["more_body"]:
                await send_body(self._send, body, more=message["more_body"])
        else:
            status, body = self._json(message["body"])
            # The length was that of the chat answer.
            kept = [item for item in self._start["headers"] if item[0] != b"content-length"]
            await send_whole(self._send, status, kept, body)

    def _json(self, raw: bytes) -> tuple[int, bytes]:
        status: int = self._start["status"]
        if status >= 400:
            error = ApiError(status, error_message(raw))
        else:
            try:
                return status, orjson.dumps(self._surface.answer(orjson.loads(raw)))
            except Exception as failure:
                error = _untranslatable(failure)
        return error.status, orjson.dumps(self._surface.error(error))

    def _events(self, raw: bytes) -> list[Json]:
        if self._broken:
            return []
        found: list[Json] = []
        try:
            for event in raw.split(b"\n\n"):
                if event:
                    found += self._event(event.removeprefix(b"data: "))
        except Exception as failure:
            # Not raised into the chat endpoint, which still has a completion to log.
            self._broken = True
            found += self._surface.failed(_untranslatable(failure))
        return found

    def _event(self, data: bytes) -> list[Json]:
        if data == _DONE:
            return self._surface.end()
        chunk = orjson.loads(data)
        if "error" in chunk:
            self._broken = True
            return self._surface.failed(ApiError(502, chunk["error"]["message"]))
        return self._surface.chunk(chunk)


def _untranslatable(failure: Exception) -> ApiError:
    log.exception("An answer could not be translated", exc_info=failure)
    return ApiError(
        500,
        f"The answer could not be translated ({type(failure).__name__}); it was logged. "
        "strop's log says more.",
        code="not_translated",
    )


def encode(event: Json) -> bytes:
    """One server-sent event, named after its type."""
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def with_reasoning_named(message: Json) -> Json:
    """A message or delta of vLLM with its reasoning where LiteLLM looks for it.

    vLLM calls the field `reasoning` now and `reasoning_content` before; LiteLLM reads the latter.
    """
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    named = {key: value for key, value in message.items() if key != "reasoning"}
    named["reasoning_content"] = reasoning
    return named


def parts(delta: Json) -> Iterator[tuple[str, Any]]:
    """What a delta brings, one kind at a time and in the order in which it was sampled."""
    if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
        yield "reasoning", reasoning
    if content := delta.get("content"):
        yield "text", content
    for call in delta.get("tool_calls") or ():
        yield "call", call


_KEPT = ("role", "content", "name", "tool_call_id", "tool_calls")


def plain_message(message: Json) -> Json:
    """A message of LiteLLM's as a chat client would have sent it.

    LiteLLM adds fields for other providers (`thinking_blocks`, an index in each tool call, nulls)
    and makes a list of a single text. vLLM's chat template may render a list unlike a string, and
    the same conversation must be the same tokens whichever surface it came through.
    """
    plain = {key: message[key] for key in _KEPT if message.get(key) is not None}
    content = plain.get("content")
    if isinstance(content, list) and len(content) == 1 and content[0].get("type") == "text":
        plain["content"] = content[0]["text"]
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"]}
            for call in plain["tool_calls"]
        ]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        plain["reasoning"] = reasoning
    return plain


def plain_tool(tool: Json) -> Json:
    """A tool without what LiteLLM fills in: the template renders it, so it costs tokens."""
    function = {
        key: value for key, value in tool["function"].items() if value not in (None, "", False)
    }
    return {"type": "function", "function": function}


class Pushed:
    """An asynchronous generator over chunks, turned round: chunks are pushed into it.

    LiteLLM's stream wrappers pull chunks, the chat endpoint hands them over. As a wrapper waits
    for nothing but its next chunk, it can be run up to that point without a task of its own.
    """

    def __init__(self, build: Callable[[AsyncIterator[Any]], AsyncIterator[Json]]):
        self._chunks: deque[Any] = deque()
        self._ended = False
        self._events = build(self._feed())
        self._step: Coroutine[Any, Any, Json] | None = None

    def push(self, chunk: Any) -> list[Json]:
        """The events up to where another chunk is needed."""
        self._chunks.append(chunk)
        return self._run()

    def end(self) -> list[Json]:
        """The events after the last chunk."""
        self._ended = True
        return self._run()

    def _run(self) -> list[Json]:
        found: list[Json] = []
        while True:
            if self._step is None:
                self._step = self._next()
            try:
                self._step.send(None)
                return found
            except StopIteration as event:
                self._step = None
                found.append(event.value)
            except StopAsyncIteration:
                return found

    async def _next(self) -> Json:
        return await anext(self._events)

    async def _feed(self) -> AsyncIterator[Any]:
        while True:
            while not self._chunks:
                if self._ended:
                    return
                await _Pause()
            yield self._chunks.popleft()


class _Pause:
    """Given up to whoever runs the coroutine by hand."""

    def __await__(self) -> Generator[None, None, None]:
        yield
