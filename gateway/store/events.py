"""What happened to policies, in order: publications, failures, rollbacks."""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, select

from gateway.store.models import Event
from gateway.store.records import Json

PAGE = 500
"""Most events that are read at once."""

GAP_SECONDS = 10.0
"""How long a number that is missing is waited for: on PostgreSQL an event gets its number before
its transaction ends, so that a later number can be there first. A transaction that was rolled back
leaves its number out for good."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event."""

    id: int
    project: str
    policy: str
    kind: str
    version: int | None
    detail: Json
    at: float


def start(connection: Connection) -> int:
    """The newest number that is settled for certain, to begin from."""
    old = time.time() - GAP_SECONDS
    query = select(Event.id).where(Event.at < old).order_by(Event.id.desc()).limit(1)
    return settled(connection, int(connection.execute(query).scalar_one_or_none() or 0))


def settled(connection: Connection, cursor: int) -> int:
    """The number up to which, beyond `cursor`, no further event will come.

    `cursor` must be settled itself.
    """
    now = time.time()
    query = select(Event.id, Event.at).where(Event.id > cursor).order_by(Event.id).limit(1000)
    for number, at in connection.execute(query):
        if number != cursor + 1 and now - at < GAP_SECONDS:
            break
        cursor = number
    return cursor


def between(
    connection: Connection,
    project: str,
    after: int,
    upto: int,
    *,
    policy: str | None = None,
    limit: int = PAGE,
) -> list[StoredEvent]:
    """Events of a project with `after < id <= upto`, oldest first."""
    query = select(Event.__table__).where(
        Event.project == project, Event.id > after, Event.id <= upto
    )
    return _events(connection, _of(query, policy).order_by(Event.id).limit(limit))


def latest(
    connection: Connection, project: str, *, policy: str | None = None, limit: int = 20
) -> list[StoredEvent]:
    """The newest events of a project, newest first."""
    query = select(Event.__table__).where(Event.project == project)
    return _events(connection, _of(query, policy).order_by(Event.id.desc()).limit(limit))


def _of(query: Select[Any], policy: str | None) -> Select[Any]:
    return query if policy is None else query.where(Event.policy == policy)


def _events(connection: Connection, query: Select[Any]) -> list[StoredEvent]:
    return [_event(row) for row in connection.execute(query).mappings()]


def _event(row: RowMapping) -> StoredEvent:
    return StoredEvent(**row)
