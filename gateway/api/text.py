"""`POST /v1/completions`: OpenAI's first surface, text after text, without messages.

A completion is logged for each prompt, because a completion has one prompt; the task of its group
is the prompt. A list of prompts is streamed one after the other, and answered at once otherwise.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from gateway.api.delivery import (
    EVENTS,
    JSON,
    NO_REPLICA,
    REPLAYED,
    answer_of,
    deliver,
    identity,
    identity_of_replay,
    open_upstream,
    store,
)
from gateway.api.endpoint import JsonEndpoint
from gateway.backends.vllm import UpstreamResponse, error_message
from gateway.capture.attribution import read_claims
from gateway.capture.request import Wants, check_choices, sampling_of, upstream_body
from gateway.capture.retries import Logged
from gateway.capture.streaming import DONE, BrokenStream, encode, relay
from gateway.capture.tokens import Json, WrongVersion
from gateway.capture.translate_text import TextCapture
from gateway.catalog import served_version
from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway
from gateway.http import headers_of, send_body, send_start, send_whole
from gateway.naming import find_model
from gateway.store.ids import new_id
from gateway.store.records import CapturedCompletion

_MOST_PROMPTS = 256
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p")
_KINDS = (
    *(("stream", bool), ("echo", bool), ("return_token_ids", bool)),
    *(("metadata", dict), ("stream_options", dict)),
)


@dataclass(slots=True)
class Exchange:
    """One prompt on its way to vLLM and back."""

    captured: CapturedCompletion
    capture: TextCapture
    upstream: Json
    served_name: str
    biased: bool


Part = Exchange | Logged
"""A prompt that is asked, or one whose answer a client lost and comes back for."""


class TextCompletions(JsonEndpoint):
    """The endpoint."""

    async def answer(
        self, gateway: Gateway, body: Json, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request."""
        prompts = _prompts(body)
        known = await gateway.retries.take(gateway.project, headers_of(scope), body, len(prompts))
        parts: list[Part | None] = [*known]
        work = _answer(gateway, scope, body, prompts, parts, send)
        await deliver(gateway, scope, receive, body, work, lambda: [*map(_answer_of, parts)])


async def _answer(
    gateway: Gateway,
    scope: Scope,
    body: Json,
    prompts: list[str | list[int]],
    parts: list[Part | None],
    send: Send,
) -> None:
    """Ask the prompts that have no part yet, and answer all; their parts are put into `parts`."""
    if None in parts:
        check_choices(body, gateway.settings.max_choices)
    n, ready = body.get("n") or 1, []
    for index, prompt in enumerate(prompts):
        part = parts[index] or await _prepare(gateway, scope, body, prompt, index * n)
        parts[index] = part
        ready.append(part)
    way = _stream if body.get("stream") else _whole
    await way(gateway, ready, body, send)


def _answer_of(part: Part | None) -> Logged | None:
    return answer_of(part.captured) if isinstance(part, Exchange) else part


def _prompts(body: Json) -> list[str | list[int]]:
    """The prompts of a request, checked as far as vLLM does not.

    Raises:
        ApiError: naming the field.
    """
    if not isinstance(body.get("model"), str):
        raise invalid("You must name a model: set `model`.", "model")
    for name, kind in _KINDS:
        if body.get(name) is not None and not isinstance(body[name], kind):
            raise invalid(f"`{name}` has the wrong type.", name, "invalid_type")
    for name in _NUMBERS:
        if body.get(name) is not None and not _is_number(body[name], float):
            raise invalid(f"`{name}` must be a number.", name, "invalid_type")
    for name, least in (("n", 1), ("max_tokens", 0), ("logprobs", 0)):
        value = body.get(name)
        if value is not None and (not _is_number(value, int) or value < least):
            raise invalid(f"`{name}` must be a whole number of at least {least}.", name)
    if (body.get("best_of") or 1) > (body.get("n") or 1):
        raise invalid("`best_of` is not supported: what it hides could not be logged.", "best_of")
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("`prompt` must be a text, token ids, or a list of either.", "prompt")
    if all(_is_number(token, int) for token in prompt):
        return [prompt]
    if len(prompt) > _MOST_PROMPTS:
        raise invalid(f"At most {_MOST_PROMPTS} prompts go into one request.", "prompt")
    for index, item in enumerate(prompt):
        ids = isinstance(item, list) and item and all(_is_number(token, int) for token in item)
        if not ids and not isinstance(item, str):
            raise invalid(f"prompt[{index}] must be a text or token ids.", f"prompt[{index}]")
    return prompt


def _is_number(value: Any, kind: type) -> bool:
    numbers = (int,) if kind is int else (int, float)
    return isinstance(value, numbers) and not isinstance(value, bool)


async def _prepare(
    gateway: Gateway, scope: Scope, body: Json, prompt: str | list[int], first: int
) -> Exchange:
    if gateway.writer.full:
        raise ApiError(429, "The log cannot keep up. Try again in a second.", retry_after=1)
    policy, pinned = await find_model(gateway, body["model"])
    metadata = body.get("metadata") or {}
    claims = read_claims(scope["path_params"], headers_of(scope), metadata)
    # Only for the task: what is logged has no messages.
    asked = [{"role": "user", "content": prompt}]
    placement = await gateway.placements.find(gateway.project, policy.name, claims, asked, None)
    versions = placement.place.versions
    began = versions.get(policy.name)
    version, served_name = served_version(policy, pinned, began, placement.ref.id)
    versions.setdefault(policy.name, version)
    sampling, biased = sampling_of(body, policy.sampling)
    try:
        upstream = upstream_body(body, served_name, sampling, policy.sampling)
    except TypeError as error:
        raise invalid(str(error)) from None
    # Here it is a number: of alternatives to each token that was sampled, whose own comes anyway.
    upstream.update(prompt=prompt, logprobs=body.get("logprobs") or 0)
    del upstream["top_logprobs"]
    captured = CapturedCompletion(
        id=new_id("cmpl-"),
        project=gateway.project,
        trajectory=placement.ref,
        policy=policy.name,
        version=version,
        trained=True,
        messages=[],
        request={**body, "prompt": prompt},
        stream=bool(body.get("stream")),
        created_at=time.time(),
        sampling=sampling,
        client_metadata=metadata or None,
        reason="side_call" if claims.train is False else None,
    )
    wants = Wants(
        logprobs=body.get("logprobs") is not None,
        token_ids=bool(body.get("return_token_ids")),
        stream=captured.stream,
        usage=False,
    )
    shown = f"{policy.name}@{version}"
    capture = TextCapture(captured.id, wants, served_name, shown, body.get("n") or 1, first)
    return Exchange(captured, capture, upstream, served_name, biased)


async def _whole(gateway: Gateway, parts: list[Part], body: Json, send: Send) -> None:
    asked = [part for part in parts if isinstance(part, Exchange)]
    tasks = [asyncio.ensure_future(_one(gateway, exchange)) for exchange in asked]
    try:
        await asyncio.gather(*tasks)
    finally:
        # After the first that fails; each of the others is in the log before the client is told.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    answers = [_response(part) for part in parts]
    choices = [choice for answer in answers for choice in answer["choices"]]
    answer = {**answers[0], "choices": choices, "usage": _usage(answers)}
    await send_whole(send, 200, [JSON, *_headers(parts)], orjson.dumps(answer))


async def _one(gateway: Gateway, exchange: Exchange) -> None:
    async with _logged(gateway, exchange) as response:
        exchange.capture.take_body(orjson.loads(await response.read()))
    await _complete(gateway, exchange)


async def _stream(gateway: Gateway, parts: list[Part], body: Json, send: Send) -> None:
    started = False

    async def show(event: bytes) -> None:
        nonlocal started
        if not started:
            await send_start(send, 200, [*EVENTS, *_headers(parts)])
            started = True
        await send_body(send, event, more=True)

    try:
        for part in parts:
            if isinstance(part, Logged):
                await show(encode({**part.response, "usage": None}))
                continue
            exchange = part
            async with _logged(gateway, exchange) as response:
                async for event in relay(response.content, exchange.capture):
                    exchange.captured.first_token_at = (
                        exchange.captured.first_token_at or time.time()
                    )
                    await show(event)
            exchange.capture.assemble()
            await _complete(gateway, exchange)
            for event in exchange.capture.held:
                await show(event)
    except ApiError as failure:
        if not started:
            raise
        await send_body(send, encode(failure.body()))
        return
    if (body.get("stream_options") or {}).get("include_usage"):
        answers = [_response(part) for part in parts]
        last = {**answers[0], "choices": [], "usage": _usage(answers)}
        await show(encode(last))
    await send_body(send, DONE)


class _logged:
    """The response to a prompt; whatever goes wrong is in the log before it is raised.

    Raises:
        ApiError: what the client is told.
    """

    def __init__(self, gateway: Gateway, exchange: Exchange):
        self._gateway = gateway
        self._exchange = exchange
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> UpstreamResponse:
        try:
            return await self._open()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise

    async def __aexit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        await self._stack.aclose()
        if error is None:
            return
        captured, capture = self._exchange.captured, self._exchange.capture
        if capture.choices:
            capture.assemble()
        _take(self._exchange)
        failure = _failure(error)
        if failure is not None and failure.code == "broke":
            self._gateway.pool.failed(captured.replica, failure.message)
        captured.status = "aborted" if failure is None or failure.code == "broke" else "error"
        captured.http_status = failure.status if failure is not None else 499
        captured.reason = "wrong_version" if isinstance(error, WrongVersion) else "aborted"
        if failure is not None and not capture.choices:
            captured.response = {"error": {"message": failure.message}}
        await store(self._gateway, captured)
        if failure is not None and failure is not error:
            raise failure from error

    async def _open(self) -> UpstreamResponse:
        exchange = self._exchange
        response = await open_upstream(
            self._gateway,
            exchange.captured,
            exchange.served_name,
            "/v1/completions",
            exchange.upstream,
            self._stack,
        )
        if response is None:
            raise ApiError(503, NO_REPLICA, retry_after=2)
        if response.status >= 400:
            raise ApiError(response.status, error_message(await response.read()))
        return response


def _failure(error: BaseException) -> ApiError | None:
    """What a client is told; None if it is gone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WrongVersion):
        return ApiError(502, str(error), code="wrong_version")
    if isinstance(error, TimeoutError):
        return ApiError(504, "vLLM did not answer in time. Send the request again.", code="broke")
    if isinstance(error, aiohttp.ClientError | BrokenStream | ValueError | KeyError | TypeError):
        message = f"vLLM broke off: {error or type(error).__name__}. Send the request again."
        return ApiError(502, message, code="broke")
    return None


def _take(exchange: Exchange) -> None:
    captured, capture = exchange.captured, exchange.capture
    captured.served_model = capture.served_model
    captured.prompt_ids = capture.prompt_ids
    captured.choices = [capture.choices[index] for index in sorted(capture.choices)]
    captured.response = capture.response or None
    if capture.usage is not None:
        captured.prompt_tokens = capture.usage.get("prompt_tokens")
        captured.completion_tokens = capture.usage.get("completion_tokens")
    captured.finished_at = time.time()


async def _complete(gateway: Gateway, exchange: Exchange) -> None:
    """Commit the completion, with what keeps it from being trained on."""
    _take(exchange)
    if exchange.captured.reason is None:
        if exchange.capture.disagreement() is not None:
            exchange.captured.reason = "no_token_ids"
        elif exchange.biased:
            exchange.captured.reason = "biased_sampling"
    await store(gateway, exchange.captured)


def _response(part: Part) -> Json:
    return part.response if isinstance(part, Logged) else part.capture.response


def _headers(parts: list[Part]) -> list[tuple[bytes, bytes]]:
    """Those of the first part, and whether any was logged before."""
    first = parts[0]
    if isinstance(first, Logged):
        return identity_of_replay(first)
    headers = identity(first.captured.id, first.captured.trajectory.id, first.capture.shown)
    return [*headers, REPLAYED] if any(isinstance(part, Logged) for part in parts) else headers


def _usage(answers: list[Json]) -> Json:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    used = [answer["usage"] or {} for answer in answers]
    return {name: sum(usage.get(name) or 0 for usage in used) for name in names}
