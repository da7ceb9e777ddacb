"""OpenAI's stored completions: list, change the metadata of, and delete what was logged."""

import asyncio
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection, update

from gateway.api.completions import completion_json, retrieve_completion
from gateway.errors import ApiError, invalid, not_found
from gateway.gateway import Gateway, gateway_of
from gateway.store import deletion, listing, queries
from gateway.store.models import Completion
from gateway.store.writer import QueueFull

router = APIRouter(tags=["completions"])
Strop = Annotated[Gateway, Depends(gateway_of)]
T = TypeVar("T")

_DELETED_AT_ONCE = 100
"""Completions that are deleted in one transaction; the log waits for no longer than that."""

_METADATA = re.compile(r"metadata\[(.*)\]")
_VERSIONED = re.compile(r"(?P<policy>.+)@(?P<number>\d{1,9})")

Limit = Annotated[int, Query(ge=1, le=100, description="Most items of one page.")]
After = Annotated[str | None, Query(description="Id of the last item of the page before.")]
Order = Annotated[Literal["asc", "desc"], Query(description="By time.")]
ForgetUses = Annotated[
    bool, Query(description="Delete the record of which steps consumed them too.")
]


async def write(gateway: Gateway, operation: Callable[[Connection], T]) -> T:
    """Run a write that is safe to repeat; returns once it is durable.

    Raises:
        ApiError: 429, too much is being written.
    """
    try:
        return await gateway.writer.run(operation)
    except QueueFull as error:
        raise ApiError(429, f"{error}. Try again in a second.", retry_after=1) from None


def deleted_json(total: deletion.Deleted) -> dict[str, Any]:
    """What the API says of many things that were deleted."""
    return {
        "object": "list.deleted",
        "deleted": True,
        "completions": total.completions,
        "trajectories": total.trajectories,
    }


def metadata_of(request: Request) -> dict[str, str]:
    """The filter of a query string with `metadata[key]=value` in it."""
    found = {}
    for name, value in request.query_params.multi_items():
        match = _METADATA.fullmatch(name)
        if match is not None:
            found[match[1]] = value
        elif name == "metadata":
            raise invalid("Filter by metadata with metadata[key]=value.", "metadata")
    for key in found:
        if '"' in key or "\\" in key:
            raise invalid(
                f"Completions cannot be filtered by the metadata key {key!r}: it holds a quote or "
                "a backslash. Leave it out of the filter and compare `metadata` in the answer.",
                "metadata",
            )
    return found


Metadata = Annotated[dict[str, str], Depends(metadata_of)]


def _page(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def page(items: list[dict[str, Any]], after: str | None, limit: int, what: str) -> dict[str, Any]:
    """The items of a page, out of all of them.

    Raises:
        ApiError: `after` names none of them.
    """
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid(
                f"after: {after!r} is no {what}. Use last_id of the page before.", "after"
            )
        items = items[places[0] + 1 :]
    return _page(items[:limit], len(items) > limit)


def _unknown(completion_id: str) -> ApiError:
    return not_found("completion", completion_id, "Use the id of a response.")


@router.get("/v1/chat/completions")
async def list_completions(
    gateway: Strop,
    metadata: Metadata,
    model: Annotated[
        str | None, Query(description="A policy, or one of its versions as `policy@N`.")
    ] = None,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
    status: Annotated[
        Literal["complete", "aborted", "error", "any"],
        Query(description="What came of them; those that failed have no choices."),
    ] = "complete",
) -> dict[str, Any]:
    """The logged completions, by page."""
    chosen = listing.Filter(metadata=metadata, status=None if status == "any" else status)
    if model is not None:
        match = _VERSIONED.fullmatch(model)
        chosen.policy = match["policy"] if match else model
        chosen.version = int(match["number"]) if match else None

    def read() -> dict[str, Any]:
        with gateway.database.read() as connection:
            found, more = listing.page(
                connection,
                gateway.project,
                chosen,
                after=after,
                limit=limit,
                descending=order == "desc",
            )
        shown = [completion_json(completion, []) for completion in found]
        for item in shown:
            del item["strop"]["rewards"]
        return _page(shown, more)

    return await asyncio.to_thread(read)


@router.delete("/v1/chat/completions")
async def delete_completions(
    gateway: Strop, metadata: Metadata, forget_uses: ForgetUses = False
) -> dict[str, Any]:
    """Delete all completions, failed ones too, whose metadata holds what is named.

    Completions that are logged meanwhile may stay; a client that breaks off can ask again.
    """
    if not metadata:
        raise invalid(
            "Name what to delete: metadata[key]=value, one or more of them. Nothing was deleted.",
            "metadata",
        )
    chosen, project = listing.Filter(metadata=metadata), gateway.project

    def find(after: str | None, limit: int, descending: bool = False) -> list[str]:
        with gateway.database.read() as connection:
            return listing.ids(
                connection, project, chosen, after=after, limit=limit, descending=descending
            )

    def delete(connection: Connection) -> deletion.Deleted:
        return deletion.delete_completions(connection, project, ids, forget_uses=forget_uses)

    total, after = deletion.Deleted(), None
    # Up to the newest of now: a log that grows as fast as this deletes would never let it end.
    newest = await asyncio.to_thread(find, None, 1, True)
    while newest and (ids := await asyncio.to_thread(find, after, _DELETED_AT_ONCE)):
        total += await write(gateway, delete)
        after = ids[-1]
        if after >= newest[0]:
            break
    return deleted_json(total)


@router.get("/v1/chat/completions/{completion_id}/messages")
async def list_messages(
    completion_id: str,
    gateway: Strop,
    after: After = None,
    limit: Limit = 20,
    order: Order = "asc",
) -> dict[str, Any]:
    """The messages that a completion answered, by page."""

    def read() -> list[Any] | None:
        with gateway.database.read() as connection:
            found = queries.completion(connection, gateway.project, completion_id)
        return found.messages if found is not None else None

    messages = await asyncio.to_thread(read)
    if messages is None:
        raise _unknown(completion_id)
    shown = [_message(f"{completion_id}-{n}", message) for n, message in enumerate(messages)]
    if order == "desc":
        shown.reverse()
    return page(shown, after, limit, "message of this completion")


def _message(id: str, message: Any) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    return {**message, "id": id, "content": content, "content_parts": parts}


class MetadataBody(BaseModel):
    """What can be changed of a completion."""

    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, str] | None


@router.post("/v1/chat/completions/{completion_id}")
async def update_completion(
    completion_id: str, body: MetadataBody, gateway: Strop
) -> dict[str, Any]:
    """Replace the metadata of a completion; its place in trajectory and group stays as it is."""
    change = (
        update(Completion)
        .where(Completion.project == gateway.project, Completion.id == completion_id)
        .values(client_metadata=body.metadata)
    )
    if not await write(gateway, lambda connection: connection.execute(change).rowcount):
        raise _unknown(completion_id)
    return await retrieve_completion(completion_id, gateway)


@router.delete("/v1/chat/completions/{completion_id}")
async def delete_completion(
    completion_id: str, gateway: Strop, forget_uses: ForgetUses = False
) -> dict[str, Any]:
    """Delete a completion with its rewards, and its trajectory if that has no other."""
    deleted = await write(
        gateway,
        lambda connection: deletion.delete_completions(
            connection, gateway.project, [completion_id], forget_uses=forget_uses
        ),
    )
    if not deleted.completions:
        raise _unknown(completion_id)
    return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}
