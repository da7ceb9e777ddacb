"""`POST /v1/responses`: OpenAI's newer surface, answered by the chat endpoint.

Everything is logged: `store: false` is accepted and changes nothing, because a completion that is
not in the database can be neither rewarded nor trained on.
"""

from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.chat import answer
from gateway.api.embeddings import forward, prompt_of
from gateway.api.endpoint import JsonEndpoint
from gateway.api.previous import conversation, find, in_its_trajectory
from gateway.capture import translate_responses
from gateway.capture.request import check_chat
from gateway.capture.translate import Translated, litellm
from gateway.capture.translate_responses import item_owner
from gateway.capture.translate_responses_events import ResponsesSurface
from gateway.errors import ApiError, invalid, json_response
from gateway.gateway import Gateway
from gateway.http import unless_hung_up
from gateway.store.records import StoredCompletion


class Responses(JsonEndpoint):
    """The endpoint."""

    async def answer(
        self, gateway: Gateway, body: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request."""
        module, chat = await _chat_request(gateway, body)
        surface = ResponsesSurface(module, body)
        await answer(gateway, scope, receive, Translated(send, surface), chat)


class InputTokens(JsonEndpoint):
    """`POST /v1/responses/input_tokens`: how long the prompt of a response would be."""

    async def answer(
        self, gateway: Gateway, body: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request."""
        _, chat = await _chat_request(gateway, body)
        check_chat(chat, gateway.settings.max_choices)

        async def work() -> None:
            counted = await forward(gateway, "/tokenize", prompt_of(chat))
            answer = {"object": "response.input_tokens", "input_tokens": counted["count"]}
            await json_response(answer)(scope, receive, send)

        await unless_hung_up(receive, work())


async def _chat_request(gateway: Gateway, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """LiteLLM's module, and the chat request with all that the body only names."""
    translate_responses.check(body)
    module = await litellm(translate_responses.MODULE)
    request = {**body, "input": await _without_references(gateway, module, body["input"])}
    before, history = None, []
    if request.get("previous_response_id"):
        before = await _previous(gateway, request["previous_response_id"])
        history = conversation(before)
        if before.request.get("instructions"):
            # They hold for their own response only, as at OpenAI.
            del history[0]
    chat = translate_responses.chat_request(module, request, history)
    if before is not None:
        in_its_trajectory(chat, before)
    return module, chat


async def _previous(gateway: Gateway, name: str) -> StoredCompletion:
    """The completion that a response continues.

    Raises:
        ApiError: there is none, or it has no answer to continue.
    """
    found = await find(gateway, name)
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


async def _without_references(gateway: Gateway, module: Any, given: Any) -> Any:
    """The input with the items in it that it only names.

    Raises:
        ApiError: 404, there is no such item.
    """
    if not isinstance(given, list):
        return given
    names = [item["id"] for item in given if item.get("type") == "item_reference"]
    items: dict[str, dict[str, Any]] = {}
    for owner in {item_owner(name) for name in names}:
        row = await find(gateway, owner) if owner is not None else None
        shown = stored_response(module, row) if row is not None else None
        items.update({item["id"]: item for item in shown["output"]} if shown else {})
    for name in names:
        if name not in items:
            raise ApiError(404, f"Item with id {name!r} not found.", param="input")
    return [items[i["id"]] if i.get("type") == "item_reference" else i for i in given]


def stored_response(module: Any, row: StoredCompletion) -> dict[str, Any] | None:
    """The response object of a completion, whichever surface it was made by; None: it has none.

    Text completions, and those that failed, have no answer in a form of their own.
    """
    chat = row.response or {}
    choices = chat.get("choices") or [{}]
    request = (row.request.get("strop") or {}).get("responses") or {}
    if "message" not in choices[0] or not chat.get("usage"):
        return None
    done = translate_responses.response(module, chat, request)
    done["completed_at"] = int(row.finished_at)
    return done
