"""Completions as they were, put together from what each turn stored of itself.

A turn stores what is new in it; the rest is its parent's, which is in the same trajectory.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, select

from gateway.store import codec
from gateway.store.models import Choice, Completion
from gateway.store.records import StoredChoice, StoredCompletion

# Built once: these are read for each trajectory that is shown, continued or trained on.
_OF = (
    Completion.project == bindparam("of_project"),
    Completion.trajectory_id.in_(bindparam("ids", expanding=True)),
)
_CHOICES = (
    select(Choice.__table__)
    .join(Completion, Completion.id == Choice.completion_id)
    .where(*_OF)
    .order_by(Choice.completion_id, Choice.index)
)


@cache
def _completions(tokens: bool) -> Select[Any]:
    columns = [c for c in Completion.__table__.c if tokens or c.name != "prompt_ids"]
    return select(*columns).where(*_OF).order_by(Completion.created_at, Completion.id)


def stored_completions(
    connection: Connection,
    project: str,
    trajectory_ids: Sequence[str],
    *,
    tokens: bool = True,
) -> list[StoredCompletion]:
    """The completions of trajectories, whole, in the order in which they were asked for.

    Args:
        tokens: False leaves out prompt ids and choices, for those who read only the text.
    """
    values = {"of_project": project, "ids": list(trajectory_ids)}
    rows = list(connection.execute(_completions(tokens), values).mappings())
    choices: dict[str, list[StoredChoice]] = {}
    for row in connection.execute(_CHOICES, values).mappings() if tokens else ():
        choices.setdefault(row["completion_id"], []).append(
            StoredChoice(
                index=row["index"],
                finish_reason=row["finish_reason"],
                token_ids=codec.decode_ids(row["token_ids"])
                if row["token_ids"] is not None
                else None,
                logprobs=codec.decode_logprobs(row["logprobs"])
                if row["logprobs"] is not None
                else None,
            )
        )
    whole: dict[str, StoredCompletion] = {}
    pending = {row["id"]: row for row in rows}
    for row in rows:
        _restore(row["id"], pending, choices, whole)
    return [whole[row["id"]] for row in rows]


def _restore(
    completion_id: str,
    rows: dict[str, RowMapping],
    choices: dict[str, list[StoredChoice]],
    whole: dict[str, StoredCompletion],
) -> None:
    # Parents first. A parent may come later in the list (clocks of two gateways), and a thread
    # may be longer than Python's stack is deep.
    stack = [completion_id]
    while stack:
        row = rows[stack[-1]]
        parent_id = row["parent_id"]
        if row["id"] not in whole and parent_id in rows and parent_id not in whole:
            stack.append(parent_id)
            continue
        stack.pop()
        if row["id"] not in whole:
            whole[row["id"]] = _whole(row, whole.get(parent_id), choices.get(row["id"], []))


def _whole(
    row: RowMapping, parent: StoredCompletion | None, choices: list[StoredChoice]
) -> StoredCompletion:
    messages = codec.decode_json(row["messages"])
    ids = row.get("prompt_ids")
    prompt = codec.decode_ids(ids) if ids is not None else None
    request = codec.decode_json(row["request"]) if row["request"] is not None else None
    if parent is not None:
        if row["messages_shared"]:
            messages = parent.messages[: row["messages_shared"]] + messages
        if prompt is not None and row["prompt_shared"]:
            shared = list(parent.prompt_ids or ())
            if len(shared) < row["prompt_shared"]:
                answer = next(c for c in parent.choices if c.index == row["parent_choice"])
                shared += answer.token_ids or []
            prompt = shared[: row["prompt_shared"]] + prompt
        if request is None:
            request = parent.request
    return StoredCompletion(
        id=row["id"],
        trajectory_id=row["trajectory_id"],
        parent_id=row["parent_id"],
        parent_choice=row["parent_choice"],
        policy=row["policy"],
        version=row["version"],
        served_model=row["served_model"],
        replica=row["replica"],
        status=row["status"],
        http_status=row["http_status"],
        reason=row["reason"],
        stream=row["stream"],
        request=request or {},
        messages=messages,
        response=codec.decode_json(row["response"]) if row["response"] is not None else None,
        prompt_ids=prompt,
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        sampling=row["sampling"],
        client_metadata=row["client_metadata"],
        created_at=row["created_at"],
        first_token_at=row["first_token_at"],
        finished_at=row["finished_at"],
        choices=choices,
        traceparent=row["traceparent"],
    )
