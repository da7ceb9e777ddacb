"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's surface, with its errors."""

from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from gateway.api.chat import answer
from gateway.api.embeddings import forward, prompt_of
from gateway.api.previous import conversation, find, in_its_trajectory
from gateway.auth import refusal
from gateway.capture import translate_messages
from gateway.capture.request import check_chat, parse_body
from gateway.capture.translate import Json, Translated, litellm
from gateway.capture.translate_messages import MessagesSurface
from gateway.errors import ApiError, json_response
from gateway.gateway import Gateway, gateway_in
from gateway.http import ClientGone, read_body, unless_hung_up

Answer = Callable[[Gateway, Json, Scope, Receive, Send], Awaitable[None]]


class Messages:
    """One of the endpoints, as a plain ASGI application."""

    def __init__(self, way: Answer):
        self._way = way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        gateway = gateway_in(scope)
        try:
            raw = await read_body(receive, gateway.settings.max_body_bytes)
            await self._way(gateway, parse_body(raw), scope, receive, send)
        except ClientGone:
            return
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)


async def create(
    gateway: Gateway, request: Json, scope: Scope, receive: Receive, send: Send
) -> None:
    """A message, sampled and logged as a chat completion."""
    translate_messages.check(request)
    module = await litellm(translate_messages.MODULE)
    body, short_names = translate_messages.chat_request(module, request)
    # The field is required, and clients fill it with what the largest models can.
    longest = gateway.pool.longest
    if longest is not None and isinstance(body["max_tokens"], int):
        body["max_tokens"] = min(body["max_tokens"], longest)
    if translate_messages.continued(request) is not None:
        short_names = await _continue(gateway, request, body)
    if short_names:
        # For the messages after this one in its thread.
        body["strop"] = {"short_names": short_names}
    types = await litellm(translate_messages.TYPES)
    surface = MessagesSurface(module, types, short_names)
    await answer(gateway, scope, receive, Translated(send, surface), body)


async def _continue(gateway: Gateway, request: Json, body: Json) -> dict[str, str]:
    """Put what a thread holds before a message that continues it; returns its short tool names.

    Raises:
        ApiError: 404, there is no such message; the SDK then sends the whole conversation.
    """
    name = translate_messages.continued(request)
    before = await find(gateway, name) if name is not None else None
    if before is None or before.status != "complete":
        raise ApiError(
            404,
            f"thread: there is no message {name!r} to continue. Send the whole conversation.",
            code="thread_not_found",
        )
    body["messages"] = [*conversation(before), *body["messages"]]
    if before.request.get("tools"):
        body["tools"] = before.request["tools"]
    in_its_trajectory(body, before)
    short_names = (before.request.get("strop") or {}).get("short_names")
    return short_names or {}


async def count_tokens(
    gateway: Gateway, request: Json, scope: Scope, receive: Receive, send: Send
) -> None:
    """How long the prompt of a message would be: what vLLM's own tokeniser and template make."""
    translate_messages.check(request, counting=True)
    module = await litellm(translate_messages.MODULE)
    body, _ = translate_messages.chat_request(module, request)
    if translate_messages.continued(request) is not None:
        await _continue(gateway, request, body)
    check_chat(body, gateway.settings.max_choices)

    async def work() -> None:
        counted = await forward(gateway, "/tokenize", prompt_of(body))
        await json_response({"input_tokens": counted["count"]})(scope, receive, send)

    await unless_hung_up(receive, work())
