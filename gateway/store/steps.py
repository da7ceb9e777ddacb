"""Reading steps, and what each of them consumed."""

from typing import Any

from sqlalchemy import Connection, select

from gateway.store.models import CompletionUse, Step

Row = dict[str, Any]


def of_policy(
    connection: Connection, project: str, policy: str, limit: int, before: int | None = None
) -> list[Row]:
    """Steps of a policy, the newest first."""
    query = select(Step.__table__).where(Step.project == project, Step.policy == policy)
    if before is not None:
        query = query.where(Step.id < before)
    query = query.order_by(Step.id.desc()).limit(limit)
    return [dict(row) for row in connection.execute(query).mappings()]


def step(connection: Connection, project: str, step_id: int) -> Row | None:
    """One step."""
    query = select(Step.__table__).where(Step.project == project, Step.id == step_id)
    found = connection.execute(query).mappings().one_or_none()
    return dict(found) if found is not None else None


def uses(connection: Connection, step_id: int) -> list[Row]:
    """What a step made of each answer, in the order in which it took them."""
    query = (
        select(CompletionUse.__table__)
        .where(CompletionUse.step_id == step_id)
        .order_by(CompletionUse.row)
    )
    return [dict(row) for row in connection.execute(query).mappings()]
