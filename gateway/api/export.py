"""`GET /v1/export` and `POST /v1/import`: the log as a file, and other logs into it."""

import asyncio
import tempfile
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import StreamingResponse

from gateway.api import bodies
from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway, gateway_of
from gateway.http import ClientGone, read_body
from gateway.store import export
from gateway.store.importing import END_OF_TIME, ChatImport, InvalidLine
from gateway.store.writer import QueueFull

router = APIRouter(tags=["export"])
Strop = Annotated[Gateway, Depends(gateway_of)]

_PIECE = 1 << 20
_SHOWN = 10
"""Lines that were passed over and are named in the answer."""


@router.get("/v1/export", response_class=StreamingResponse)
def export_log(
    gateway: Strop,
    format: Annotated[
        Literal["jsonl", "openai", "parquet"],
        Query(
            description="`jsonl`: chats with rewards. `openai`: OpenAI's fine-tuning format. "
            "`parquet`: every answer with its exact tokens; sent once it is whole."
        ),
    ] = "jsonl",
    policy: Annotated[str | None, Query(description="Of this policy alone.")] = None,
    split: Annotated[Literal["train", "eval"] | None, Query(description="`train`, `eval`.")] = None,
    min_reward: Annotated[
        float | None,
        Query(allow_inf_nan=False, description="Leave out what is worth less, or is not rewarded."),
    ] = None,
) -> StreamingResponse:
    """The log of the key's project, the oldest first; as JSON lines one chat a line.

    JSON lines are sent as they are read: a connection that ends early was not the whole log.
    """
    selection = export.Selection(gateway.project, policy, split, min_reward)
    if format == "parquet":
        return _parquet(gateway, selection)
    # Starlette takes each piece in a thread. A batch may have nothing to show.
    return StreamingResponse(
        filter(None, export.lines(gateway.database, selection, format)),
        media_type="application/x-ndjson",
        headers={"content-disposition": f'attachment; filename="strop-{format}.jsonl"'},
    )


def _parquet(gateway: Gateway, selection: export.Selection) -> StreamingResponse:
    # What a Parquet file holds is told at its end. On the disk: it may be larger than the memory.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        export.write_parquet(gateway.database, selection, file)
    except export.MissingPyarrow as error:
        file.close()
        raise ApiError(501, str(error), code="not_installed") from None
    except OSError as error:
        file.close()
        raise ApiError(503, f"The file cannot be written: {error}.", retry_after=5) from error
    size = file.tell()
    file.seek(0)

    def pieces() -> Iterator[bytes]:
        with file:
            while piece := file.read(_PIECE):
                yield piece

    return StreamingResponse(
        pieces(),
        media_type="application/vnd.apache.parquet",
        headers={
            "content-length": str(size),
            "content-disposition": 'attachment; filename="strop.parquet"',
        },
    )


@router.post(
    "/v1/import",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                # One chat is a line too.
                "application/json": {"schema": bodies.CHAT},
                "application/x-ndjson": {"schema": {"type": "string"}},
            },
        }
    },
)
async def import_log(
    request: Request,
    gateway: Strop,
    policy: Annotated[
        str, Query(min_length=1, max_length=256, description="For lines that name no `model`.")
    ] = "imported",
    created: Annotated[
        float | None,
        Query(
            ge=0,
            lt=END_OF_TIME,
            allow_inf_nan=False,
            description="Unix seconds, for lines that name no `created`. The same body with the "
            "same time is stored once.",
        ),
    ] = None,
    skip_invalid: Annotated[bool, Query(description="Pass over lines that are no chat.")] = False,
) -> dict[str, Any]:
    """Log chats from elsewhere: `{"messages": [..., the answer]}`, one JSON object a line.

    `tools`, `model`, `created`, `metadata` and `reward` are kept. Without tokens they are not
    trained on. What is there already is passed over, so the same body can be sent again.
    """
    try:
        body = await read_body(request.receive, gateway.settings.max_body_bytes)
    except ClientGone:
        # Nobody reads this.
        raise invalid("The body ended early. Nothing was imported.") from None
    lines = body.splitlines()
    work = ChatImport(gateway.database, gateway.project, policy, created, skip_invalid)
    try:
        if not skip_invalid:
            # Before the first is stored.
            await asyncio.to_thread(lambda: sum(1 for _ in work.chats(lines)))
        await work.run(gateway.writer, lines)
    except InvalidLine as error:
        raise invalid(
            f"{error} Nothing was imported. Repair the line, or pass over such lines with "
            "skip_invalid=true.",
            code="invalid_line",
        ) from None
    except QueueFull as error:
        raise ApiError(
            429,
            f"{error}. {work.stored} chats were imported; send the same again in a second.",
            retry_after=1,
        ) from None
    return {
        "object": "import",
        "stored": work.stored,
        "known": work.known,
        "skipped": len(work.skipped),
        "problems": work.skipped[:_SHOWN],
    }
