"""Chat completions of other providers: logged like the policies' own, without tokens."""

import asyncio
import time
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from gateway.api.delivery import (
    EVENTS,
    JSON,
    answer_of,
    deliver,
    identity,
    leave_keys,
    store,
    take_tokens,
)
from gateway.backends import providers
from gateway.capture.attribution import read_claims
from gateway.capture.placement import Placement
from gateway.capture.request import check_chat, wants_of
from gateway.capture.streaming import DONE, encode
from gateway.capture.tokens import Capture
from gateway.errors import ApiError
from gateway.gateway import Gateway
from gateway.http import headers_of, send_body, send_start, send_whole
from gateway.store.ids import new_id
from gateway.store.records import CapturedCompletion

Json = dict[str, Any]


async def answer(gateway: Gateway, scope: Scope, receive: Receive, send: Send, body: Json) -> None:
    """Answer a request for a configured provider's model."""
    check_chat(body, gateway.settings.max_choices)
    name = body["model"]
    claims = read_claims(scope["path_params"], headers_of(scope), body.get("metadata") or {})
    placement = await gateway.placements.find(
        gateway.project, name, claims, body["messages"], body.get("tools")
    )
    captured = CapturedCompletion(
        id=new_id("chatcmpl-"),
        project=gateway.project,
        trajectory=placement.ref,
        policy=name,
        version=None,
        trained=False,
        messages=body["messages"],
        request={key: value for key, value in body.items() if key != "messages"},
        stream=bool(body.get("stream")),
        created_at=time.time(),
        tail=placement.tail,
        client_metadata=body.get("metadata") or None,
        reason="no_token_ids",
        replica=gateway.settings.providers[name].model,
    )
    way = _stream if captured.stream else _whole
    work = way(gateway, captured, placement, body, send)
    await deliver(gateway, scope, receive, body, work, lambda: [answer_of(captured)])


async def _whole(
    gateway: Gateway, captured: CapturedCompletion, placement: Placement, body: Json, send: Send
) -> None:
    provider = gateway.settings.providers[captured.policy]
    try:
        response = await providers.complete(provider, body)
    except asyncio.CancelledError:
        await _ended(gateway, captured, "aborted", 499)
        raise
    except providers.ProviderError as error:
        await _ended(gateway, captured, "error", error.status, error.message)
        raise error.as_api_error() from error
    capture = _capture(captured, body)
    capture.take_body(response)
    await _store(gateway, captured, placement, capture)
    await send_whole(send, 200, [JSON, *_headers(captured)], orjson.dumps(capture.response))


async def _stream(
    gateway: Gateway, captured: CapturedCompletion, placement: Placement, body: Json, send: Send
) -> None:
    provider = gateway.settings.providers[captured.policy]
    capture = _capture(captured, body)
    started = False
    try:
        async for chunk in providers.stream(provider, body):
            if not capture.take_chunk(chunk):
                continue
            if capture.finished or not chunk.get("choices"):
                capture.held.append(encode(chunk))
                continue
            if not started:
                captured.first_token_at = time.time()
                await send_start(send, 200, [*EVENTS, *_headers(captured)])
                started = True
            await send_body(send, encode(chunk), more=True)
    except asyncio.CancelledError:
        await _ended(gateway, captured, "aborted", 499)
        raise
    except providers.ProviderError as error:
        await _ended(gateway, captured, "error", error.status, error.message)
        if not started:
            raise error.as_api_error() from error
        await send_body(send, encode(error.as_api_error().body()))
        return
    capture.assemble()
    try:
        await _store(gateway, captured, placement, capture)
    except ApiError as failure:
        if not started:
            raise
        await send_body(send, encode(failure.body()))
        return
    if not started:
        await send_start(send, 200, [*EVENTS, *_headers(captured)])
    await send_body(send, b"".join((*capture.held, DONE)))


def _capture(captured: CapturedCompletion, body: Json) -> Capture:
    return Capture(captured.id, wants_of(body), None, captured.policy, body.get("n") or 1)


def _headers(captured: CapturedCompletion) -> list[tuple[bytes, bytes]]:
    return identity(captured.id, captured.trajectory.id, None)


async def _store(
    gateway: Gateway, captured: CapturedCompletion, placement: Placement, capture: Capture
) -> None:
    take_tokens(captured, capture)
    captured.response = capture.response
    leave_keys(capture, placement)
    await store(gateway, captured)


async def _ended(
    gateway: Gateway, captured: CapturedCompletion, status: str, code: int, message: str = ""
) -> None:
    captured.status, captured.http_status = status, code
    captured.reason = "aborted"
    if message:
        captured.response = {"error": {"message": message}}
    await store(gateway, captured)
