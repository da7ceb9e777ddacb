"""What Langfuse does not know yet: one row per thing, written in the transaction that made it.

A cursor over the log itself would not do: PostgreSQL's transactions become visible in another
order than that in which they took their numbers, so a cursor can pass over a row. A row that is
deleted once it is delivered cannot be passed over.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Connection,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)

from gateway.store import leases
from gateway.store.base import insert_into
from gateway.store.bulk import new_rows
from gateway.store.models import Completion, Reward, Trajectory
from gateway.store.tracing_models import LangfuseCursor, Lease, OutboxEntry

_ADD = new_rows(OutboxEntry)

TRACED_SECONDS = 7 * 86_400.0
"""How long a project counts as traced after a sender last said so: gateways may be away, and what a
trainer does in the meantime belongs to its traces too."""

COMPLETION = "completion"
REWARD = "reward"


@dataclass(slots=True, frozen=True)
class Entry:
    """Something that is to be sent."""

    row: int
    kind: str
    ref: str
    at: float
    """Unix seconds since which it waits."""


@dataclass(slots=True, frozen=True)
class Lag:
    """How far a project's Langfuse is behind."""

    project: str
    waiting: int
    refused: int
    oldest_seconds: float
    """Age of the oldest that waits; 0 if nothing does."""


def add(connection: Connection, kind: str, things: Iterable[tuple[str, str]], now: float) -> None:
    """Note things as to be sent, each a project and an id."""
    rows = [{"project": project, "kind": kind, "ref": ref, "at": now} for project, ref in things]
    if rows:
        _ADD[connection.dialect.name].run(connection, rows)


def add_where_traced(
    connection: Connection, project: str, completion_ids: Sequence[str], now: float
) -> None:
    """Note completions about which something became known, if their project is traced.

    It is where a sender has said so within `TRACED_SECONDS`: what is noted for a project that no
    gateway has keys for any more would never leave.
    """
    traced = exists().where(Lease.name == _mark(project), Lease.expires > now)
    if completion_ids and connection.execute(select(traced)).scalar_one():
        unique = dict.fromkeys(completion_ids)
        add(connection, COMPLETION, [(project, each) for each in unique], now)


def trace_project(connection: Connection, project: str, now: float) -> None:
    """Note that a project has a Langfuse now. To be repeated within `TRACED_SECONDS`."""
    row = {"project": project, "position": 0.0, "compared_at": 0.0}
    insert = insert_into(connection, LangfuseCursor)
    connection.execute(insert.values(row).on_conflict_do_nothing())
    # All that send for a project say the same, so it is nobody's in particular.
    leases.take(connection, _mark(project), "any", TRACED_SECONDS, now)


def forget_project(connection: Connection, project: str, limit: int) -> int:
    """Drop up to `limit` of what waits for a project, and that it is traced; returns how many.

    How far its scores were read stays: they are rewards still, and would be taken again.
    """
    connection.execute(delete(Lease).where(Lease.name == _mark(project)))
    some = select(OutboxEntry.row).where(OutboxEntry.project == project).limit(limit)
    gone = delete(OutboxEntry).where(OutboxEntry.row.in_(some.scalar_subquery()))
    return connection.execute(gone).rowcount


def _mark(project: str) -> str:
    return f"langfuse traces/{project}"


def pending(connection: Connection, project: str, limit: int) -> list[Entry]:
    """The oldest entries of a project that were not refused."""
    query = (
        select(OutboxEntry.row, OutboxEntry.kind, OutboxEntry.ref, OutboxEntry.at)
        .where(OutboxEntry.project == project, OutboxEntry.error.is_(None))
        .order_by(OutboxEntry.row)
        .limit(limit)
    )
    return [Entry(*row) for row in connection.execute(query)]


def delivered(connection: Connection, rows: Sequence[int]) -> None:
    """Forget entries that Langfuse has accepted."""
    if rows:
        connection.execute(delete(OutboxEntry).where(OutboxEntry.row.in_(rows)))


def refused(connection: Connection, rows: Sequence[int], error: str) -> None:
    """Set entries aside that Langfuse does not take, with what it said."""
    connection.execute(
        update(OutboxEntry).where(OutboxEntry.row.in_(rows)).values(error=error[:1000])
    )


def retry_refused(connection: Connection, project: str | None) -> int:
    """Let refused entries be sent again; returns how many."""
    query = update(OutboxEntry).where(OutboxEntry.error.is_not(None)).values(error=None)
    if project is not None:
        query = query.where(OutboxEntry.project == project)
    return connection.execute(query).rowcount


def lag(connection: Connection, now: float) -> list[Lag]:
    """How far each traced project is behind, for metrics and for people."""
    counts: dict[str, tuple[int, int, float | None]] = {}
    query = select(
        OutboxEntry.project,
        func.count().filter(OutboxEntry.error.is_(None)),
        func.count().filter(OutboxEntry.error.is_not(None)),
        func.min(OutboxEntry.at).filter(OutboxEntry.error.is_(None)),
    ).group_by(OutboxEntry.project)
    for project, waiting, aside, oldest in connection.execute(query):
        counts[project] = (waiting, aside, oldest)
    for project in connection.execute(select(LangfuseCursor.project)).scalars():
        counts.setdefault(project, (0, 0, None))
    return [
        Lag(project, waiting, aside, max(0.0, now - oldest) if oldest is not None else 0.0)
        for project, (waiting, aside, oldest) in sorted(counts.items())
    ]


def backfill(
    connection: Connection,
    project: str,
    *,
    since: float,
    until: float,
    after: str,
    limit: int,
    now: float,
) -> tuple[int, str | None]:
    """Note the completions of a time, and the rewards of their trajectories, as to be sent.

    Args:
        since, until: Unix seconds, of the beginning of a trajectory; the end is not included.
        after: the trajectory that the last call ended with; empty at first.
        limit: most trajectories in this call.

    Returns:
        How many entries were made, and `after` for the next call; None if this was the last.
    """
    query = (
        select(Trajectory.id)
        .where(
            Trajectory.project == project,
            Trajectory.created_at >= since,
            Trajectory.created_at < until,
            Trajectory.id > after,
        )
        .order_by(Trajectory.id)
        .limit(limit)
    )
    ids = list(connection.execute(query).scalars())
    count = 0
    for kind, model in ((COMPLETION, Completion), (REWARD, Reward)):
        source: Any = select(literal(project), literal(kind), model.id, literal(now)).where(
            model.project == project, model.trajectory_id.in_(ids)
        )
        statement = insert(OutboxEntry).from_select(["project", "kind", "ref", "at"], source)
        options = {"preserve_rowcount": True}
        count += connection.execute(statement, execution_options=options).rowcount
    return count, ids[-1] if len(ids) == limit else None
