"""What was answered on `/v1/responses`, asked for again: OpenAI's calls for a stored response."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from gateway.api.ids import completion_id, response_id
from gateway.api.previous import find
from gateway.api.responses import stored_response
from gateway.api.stored import After, ForgetUses, Limit, Order, page, write
from gateway.capture import translate_responses
from gateway.capture.translate import litellm
from gateway.capture.translate_items import items_of
from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway, gateway_of
from gateway.store import deletion
from gateway.store.records import StoredCompletion

router = APIRouter(tags=["responses"])
Strop = Annotated[Gateway, Depends(gateway_of)]
Include = Annotated[list[str], Query(alias="include[]", description="Changes nothing here.")]


async def _stored(gateway: Gateway, name: str) -> StoredCompletion:
    found = await find(gateway, name)
    # Text completions have no messages, and so no form as a response.
    if found is None or not found.messages:
        raise ApiError(404, f"Response with id {name!r} not found.", code="response_not_found")
    return found


@router.get("/v1/responses/{id}")
async def retrieve_response(
    id: str,
    gateway: Strop,
    stream: Annotated[bool, Query(description="Not supported: it has ended.")] = False,
    include: Include = [],  # noqa: B006 (FastAPI copies it)
) -> dict[str, Any]:
    """One response; a completion of another surface in the form of a response."""
    if stream:
        raise invalid("A response that has ended is not streamed again; leave stream out.")
    found = await _stored(gateway, id)
    module = await litellm(translate_responses.MODULE)
    shown = stored_response(module, found)
    if shown is not None:
        return shown
    request = (found.request.get("strop") or {}).get("responses") or {}
    model = f"{found.policy}@{found.version}"
    failed = translate_responses.shell(request, found.id, int(found.created_at), model)
    error = ((found.response or {}).get("error") or {}).get("message")
    failed["status"] = "failed"
    failed["error"] = {
        "code": "server_error",
        "message": error or "It was broken off before it had ended.",
    }
    return failed


@router.delete("/v1/responses/{id}")
async def delete_response(
    id: str, gateway: Strop, forget_uses: ForgetUses = False
) -> dict[str, Any]:
    """Delete a response with its rewards; responses that continue it stay whole."""
    found = await _stored(gateway, id)
    await write(
        gateway,
        lambda connection: deletion.delete_completions(
            connection, gateway.project, [found.id], forget_uses=forget_uses
        ),
    )
    return {"id": response_id(found.id), "object": "response", "deleted": True}


@router.get("/v1/responses/{id}/input_items")
async def list_input_items(
    id: str,
    gateway: Strop,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    include: Include = [],  # noqa: B006
) -> dict[str, Any]:
    """What a response was made from, by page: its input, and the responses before it."""
    found = await _stored(gateway, id)
    request = (found.request.get("strop") or {}).get("responses") or {}
    tools = request.get("tools") or []
    custom = {tool["name"] for tool in tools if tool.get("type") == "custom"}
    # Instructions are no input.
    messages = found.messages[1:] if found.request.get("instructions") else found.messages
    items = items_of(messages, completion_id(id).removeprefix("chatcmpl-"), custom)
    if order == "desc":
        items.reverse()
    return page(items, after, limit, "item of this response")


@router.post("/v1/responses/{id}/cancel")
async def cancel_response(id: str, gateway: Strop) -> dict[str, Any]:
    """Always refused: only responses in the background can be cancelled, and there are none."""
    await _stored(gateway, id)
    raise invalid("Cannot cancel a synchronous response. Close its connection instead.")
