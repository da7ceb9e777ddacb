"""`GET /v1/events`: what happens to policies, as server-sent events."""

from collections.abc import AsyncIterator
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import StreamingResponse

from gateway.errors import invalid
from gateway.events import event_json
from gateway.gateway import Gateway, gateway_of
from gateway.store.events import StoredEvent

# Not in the OpenAPI description: a client made from it would wait for the end of the answer.
router = APIRouter(include_in_schema=False)
Strop = Annotated[Gateway, Depends(gateway_of)]

_RETRY = b"retry: 2000\n\n"
_STILL_THERE = b": still there\n\n"


@router.get("/v1/events")
async def stream_events(
    gateway: Strop,
    policy: Annotated[str | None, Query(description="Of this policy alone.")] = None,
    type: Annotated[list[str] | None, Query(description="Of these types alone.")] = None,
    last_event_id: Annotated[
        str | None, Header(description="Go on after this event; 0 is the very beginning.")
    ] = None,
) -> StreamingResponse:
    """The events of the project from now on, or from the one that `Last-Event-ID` names."""
    if last_event_id is None:
        after = await gateway.events.now()
    else:
        if not last_event_id.isdecimal() or len(last_event_id) > 18:
            raise invalid(
                f"Last-Event-ID {last_event_id!r} is no number of an event. Leave it out to get "
                "what happens from now on, or send 0 for everything.",
                "Last-Event-ID",
            )
        after = int(last_event_id)
    found = gateway.events.stream(gateway.project, after, policy=policy, kinds=type or ())
    return StreamingResponse(
        _frames(found),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _frames(found: AsyncIterator[StoredEvent | None]) -> AsyncIterator[bytes]:
    yield _RETRY
    async for event in found:
        if event is None:
            yield _STILL_THERE
            continue
        data = orjson.dumps(event_json(event))
        yield b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), data)
