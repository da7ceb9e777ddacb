"""`POST /v1/responses`: OpenAI's newer surface, answered by the chat endpoint.

Everything is logged: `store: false` is accepted and changes nothing, because a completion that is
not in the database can be neither rewarded nor trained on.
"""

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.chat import answer
from gateway.api.endpoint import JsonEndpoint
from gateway.api.ids import completion_id
from gateway.capture import translate_responses
from gateway.capture.translate import Json, Translated, litellm, plain_message
from gateway.capture.translate_responses_events import ResponsesSurface
from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway
from gateway.store import queries
from gateway.store.records import StoredCompletion


class Responses(JsonEndpoint):
    """The endpoint."""

    async def answer(
        self, gateway: Gateway, body: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request."""
        request = body
        translate_responses.check(request)
        module = await litellm(translate_responses.MODULE)
        before = None
        if request.get("previous_response_id"):
            before = await _previous(gateway, request["previous_response_id"])
        history = _messages(before) if before is not None else []
        chat = translate_responses.chat_request(module, request, history)
        if before is not None:
            # Of two conversations that went alike, the id says which is meant.
            chat["metadata"] = {"trajectory_id": before.trajectory_id, **chat.get("metadata", {})}
        surface = ResponsesSurface(module, request)
        await answer(gateway, scope, receive, Translated(send, surface), chat)


async def _previous(gateway: Gateway, name: str) -> StoredCompletion:
    """The completion that a response continues.

    Raises:
        ApiError: there is none, or it has no answer to continue.
    """

    def read() -> StoredCompletion | None:
        with gateway.database.read() as connection:
            return queries.completion(connection, gateway.project, completion_id(name))

    found = await asyncio.to_thread(read)
    if found is None:
        # 400 and this code are OpenAI's.
        raise ApiError(
            400,
            f"Previous response with id {name!r} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if found.status != "complete":
        raise invalid(
            f"The response {name!r} did not complete ({found.status}), so it has no answer to "
            "continue.",
            "previous_response_id",
        )
    return found


def _messages(before: StoredCompletion) -> list[Json]:
    """What a response continues; instructions hold for their own response only, as at OpenAI."""
    messages = before.messages[1:] if before.request.get("instructions") else before.messages
    choices = (before.response or {})["choices"]
    return [*messages, plain_message({"role": "assistant", **choices[0]["message"]})]
