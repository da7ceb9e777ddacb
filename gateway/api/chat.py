"""`POST /v1/chat/completions`: the hot path, from the socket to the database and back."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from gateway.api import provided
from gateway.api.delivery import (
    EVENTS,
    JSON,
    NO_REPLICA,
    answer_of,
    deliver,
    identity,
    identity_of_replay,
    leave_keys,
    open_upstream,
    store,
    take_tokens,
)
from gateway.api.endpoint import JsonEndpoint
from gateway.backends.vllm import UpstreamResponse, error_message
from gateway.capture.attribution import read_claims
from gateway.capture.placement import Placement
from gateway.capture.request import (
    Wants,
    check_chat,
    is_multimodal,
    sampling_of,
    upstream_body,
    wants_of,
)
from gateway.capture.retries import Logged, as_chunks
from gateway.capture.streaming import DONE, BrokenStream, encode, relay
from gateway.capture.tokens import Capture, WrongVersion
from gateway.catalog import served_version
from gateway.errors import ApiError
from gateway.gateway import Gateway
from gateway.http import headers_of, send_body, send_start, send_whole
from gateway.naming import find_model
from gateway.store.ids import new_id
from gateway.store.records import CapturedCompletion

log = logging.getLogger("strop.chat")

Json = dict[str, Any]

_UPSTREAM_GONE = (aiohttp.ClientError, BrokenStream, TimeoutError)


@dataclass(slots=True)
class Exchange:
    """One request on its way to vLLM and back."""

    captured: CapturedCompletion
    capture: Capture
    placement: Placement
    upstream: Json
    served_name: str
    biased: bool
    side_call: bool

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What a client can read without parsing the body."""
        captured = self.captured
        return identity(captured.id, captured.trajectory.id, self.capture.shown)


class ChatCompletions(JsonEndpoint):
    """The endpoint."""

    async def answer(
        self, gateway: Gateway, body: Json, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request."""
        await answer(gateway, scope, receive, send, body)


async def answer(gateway: Gateway, scope: Scope, receive: Receive, send: Send, body: Json) -> None:
    """Answer a chat request whose body has been read; other surfaces translate to this one.

    Raises:
        ApiError: nothing was sent yet.
    """
    (again,) = await gateway.retries.take(gateway.project, headers_of(scope), body)
    if again is not None:
        work = _replay(again, wants_of(body), send)
        await deliver(gateway, scope, receive, body, work, lambda: [again])
        return
    model = body.get("model")
    if isinstance(model, str) and model in gateway.settings.providers:
        await provided.answer(gateway, scope, receive, send, body)
        return
    exchange = await _prepare(gateway, scope, body)
    way = _stream if exchange.captured.stream else _json
    work = way(gateway, exchange, send)
    await deliver(gateway, scope, receive, body, work, lambda: [answer_of(exchange.captured)])


async def _replay(answer: Logged, wants: Wants, send: Send) -> None:
    """Give a logged answer to the client that lost it."""
    headers = identity_of_replay(answer)
    if not wants.stream:
        await send_whole(send, 200, [JSON, *headers], orjson.dumps(answer.response))
        return
    chunks = as_chunks(answer.response)
    await send_start(send, 200, [*EVENTS, *headers])
    shown = chunks if wants.usage else chunks[:-1]
    await send_body(send, b"".join([*(encode(chunk) for chunk in shown), DONE]))


async def _prepare(gateway: Gateway, scope: Scope, body: Json) -> Exchange:
    created_at = time.time()
    check_chat(body, gateway.settings.max_choices)
    if gateway.writer.full:
        raise ApiError(
            429,
            "The database is not keeping up with the log. Try again in a second.",
            code="log_queue_full",
            retry_after=1,
        )
    project, messages = gateway.project, body["messages"]
    policy, pinned = await find_model(gateway, body["model"])
    metadata = body.get("metadata") or {}
    claims = read_claims(scope["path_params"], headers_of(scope), metadata)
    placement = await gateway.placements.find(
        project, policy.name, claims, messages, body.get("tools")
    )
    began = placement.place.versions.get(policy.name)
    version, served_name = served_version(policy, pinned, began, placement.ref.id)
    placement.place.versions.setdefault(policy.name, version)
    sampling, biased = sampling_of(body, policy.sampling)
    side_call = claims.train is False or policy.is_side_call(messages)
    upstream = upstream_body(body, served_name, sampling, policy.sampling)
    captured = CapturedCompletion(
        id=new_id("chatcmpl-"),
        project=project,
        trajectory=placement.ref,
        policy=policy.name,
        version=version,
        trained=True,
        messages=messages,
        request={name: value for name, value in body.items() if name != "messages"},
        stream=bool(body.get("stream")),
        created_at=created_at,
        tail=placement.tail,
        sampling=sampling,
        client_metadata=metadata or None,
    )
    shown = f"{policy.name}@{version}"
    capture = Capture(captured.id, wants_of(body), served_name, shown, body.get("n") or 1)
    return Exchange(captured, capture, placement, upstream, served_name, biased, side_call)


async def _json(gateway: Gateway, exchange: Exchange, send: Send) -> None:
    captured, capture = exchange.captured, exchange.capture
    try:
        async with AsyncExitStack() as stack:
            response = await _open(gateway, exchange, stack)
            raw = await response.read()
            status = response.status
        captured.first_token_at = time.time()
        if status >= 400:
            await _upstream_error(gateway, exchange, status, raw, send)
            return
        capture.take_body(orjson.loads(raw))
    except asyncio.CancelledError:
        await _abort(gateway, exchange, 499)
        raise
    except WrongVersion as error:
        raise await _refuse(gateway, exchange, 502, str(error), "wrong_version") from error
    except (*_UPSTREAM_GONE, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise await _upstream_broke(gateway, exchange, error) from error
    _complete(exchange)
    await store(gateway, exchange.captured)
    await send_whole(send, 200, [JSON, *exchange.headers()], orjson.dumps(capture.response))


async def _stream(gateway: Gateway, exchange: Exchange, send: Send) -> None:
    captured, capture = exchange.captured, exchange.capture
    started = False
    try:
        async with AsyncExitStack() as stack:
            response = await _open(gateway, exchange, stack)
            if response.status >= 400:
                raw = await response.read()
                await _upstream_error(gateway, exchange, response.status, raw, send)
                return
            async for event in relay(response.content, capture):
                if not started:
                    captured.first_token_at = time.time()
                    await send_start(send, 200, [*EVENTS, *exchange.headers()])
                    started = True
                await send_body(send, event, more=True)
    except asyncio.CancelledError:
        await _abort(gateway, exchange, 499)
        raise
    except WrongVersion as error:
        raise await _refuse(gateway, exchange, 502, str(error), "wrong_version") from error
    except _UPSTREAM_GONE as error:
        failure = await _upstream_broke(gateway, exchange, error)
        if not started:
            raise failure from error
        await send_body(send, encode(failure.body()))
        return
    capture.assemble()
    _complete(exchange)
    try:
        await store(gateway, exchange.captured)
    except ApiError as failure:
        if not started:
            raise
        await send_body(send, encode(failure.body()))
        return
    if not started:
        await send_start(send, 200, [*EVENTS, *exchange.headers()])
    await send_body(send, b"".join((*capture.held, DONE)))


async def _open(gateway: Gateway, exchange: Exchange, stack: AsyncExitStack) -> UpstreamResponse:
    response = await open_upstream(
        gateway,
        exchange.captured,
        exchange.served_name,
        "/v1/chat/completions",
        exchange.upstream,
        stack,
    )
    if response is None:
        raise await _refuse(gateway, exchange, 503, NO_REPLICA, "aborted", retry_after=2)
    return response


def _complete(exchange: Exchange) -> None:
    """Take over what came back, and say whether it can be trained on."""
    captured, capture = exchange.captured, exchange.capture
    take_tokens(captured, capture)
    captured.response = capture.response
    disagreement = capture.disagreement()
    if exchange.side_call:
        captured.reason = "side_call"
    elif disagreement is not None:
        captured.reason = "no_token_ids"
        log.warning("%s cannot be trained on: %s", captured.id, disagreement)
    elif is_multimodal(captured.messages):
        captured.reason = "multimodal"
    elif exchange.biased:
        captured.reason = "biased_sampling"
    leave_keys(capture, exchange.placement)


async def _abort(gateway: Gateway, exchange: Exchange, status: int) -> None:
    """Keep what had come until the client or vLLM went away."""
    captured, capture = exchange.captured, exchange.capture
    take_tokens(captured, capture)
    if captured.stream and capture.choices:
        capture.assemble()
        captured.response = capture.response
    captured.status, captured.reason, captured.http_status = "aborted", "aborted", status
    await store(gateway, exchange.captured)


async def _upstream_broke(gateway: Gateway, exchange: Exchange, error: BaseException) -> ApiError:
    timed_out = isinstance(error, TimeoutError)
    status = 504 if timed_out else 502
    gateway.pool.failed(exchange.captured.replica, str(error) or type(error).__name__)
    await _abort(gateway, exchange, status)
    what = "did not answer in time" if timed_out else f"broke off: {error or type(error).__name__}"
    return ApiError(status, f"vLLM {what}. The request may be sent again.", code="upstream_failed")


async def _refuse(
    gateway: Gateway,
    exchange: Exchange,
    status: int,
    message: str,
    reason: str,
    retry_after: int | None = None,
) -> ApiError:
    captured = exchange.captured
    captured.status, captured.reason, captured.http_status = "error", reason, status
    captured.served_model = exchange.capture.served_model
    captured.response = {"error": {"message": message}}
    await store(gateway, exchange.captured)
    return ApiError(status, message, code=reason, retry_after=retry_after)


async def _upstream_error(
    gateway: Gateway, exchange: Exchange, status: int, raw: bytes, send: Send
) -> None:
    """Log vLLM's error and hand it on as it was."""
    captured = exchange.captured
    captured.status, captured.reason, captured.http_status = "error", "aborted", status
    captured.response = {"error": {"message": error_message(raw)}}
    await store(gateway, exchange.captured)
    await send_whole(send, status, [JSON, *exchange.headers()], raw)
