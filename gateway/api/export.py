"""`GET /v1/export`: the log as JSON lines, streamed."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from starlette.responses import StreamingResponse

from gateway.gateway import Gateway, gateway_of
from gateway.store import export

router = APIRouter(tags=["export"])
Strop = Annotated[Gateway, Depends(gateway_of)]


@router.get("/v1/export", response_class=StreamingResponse)
def export_log(
    gateway: Strop,
    format: Annotated[
        Literal["jsonl", "openai"],
        Query(
            description="`jsonl`: chats with rewards. `openai`: OpenAI's fine-tuning format. "
            "For Parquet with tokens use `strop export`."
        ),
    ] = "jsonl",
    policy: Annotated[str | None, Query(description="Of this policy alone.")] = None,
    split: Annotated[Literal["train", "eval"] | None, Query(description="`train`, `eval`.")] = None,
    min_reward: Annotated[
        float | None,
        Query(allow_inf_nan=False, description="Leave out what is worth less, or is not rewarded."),
    ] = None,
) -> StreamingResponse:
    """One chat a line, the oldest first. A connection that ends early was not the whole log."""
    selection = export.Selection(gateway.project, policy, split, min_reward)

    # Starlette takes each piece in a thread. A batch may have nothing to show.
    return StreamingResponse(
        filter(None, export.lines(gateway.database, selection, format)),
        media_type="application/x-ndjson",
        headers={"content-disposition": f'attachment; filename="strop-{format}.jsonl"'},
    )
