"""Pages of completions, in the order in which they were made.

A page is cut by id: ids sort by time, so the cursor need not be in the database any more. A client
that deletes what it lists loses nothing.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, select, text, type_coerce
from sqlalchemy.dialects.postgresql import JSONB

from gateway.store import codec
from gateway.store.models import Completion
from gateway.store.records import Json


@dataclass(slots=True)
class ListedCompletion:
    """A completion without its prompt and messages, which would have to be put together."""

    id: str
    trajectory_id: str
    parent_id: str | None
    policy: str
    version: int | None
    replica: str | None
    status: str
    http_status: int
    reason: str | None
    response: Json | None
    sampling: Json
    client_metadata: Json | None
    created_at: float
    finished_at: float


@dataclass(slots=True)
class Filter:
    """Which completions to list; None matches all."""

    policy: str | None = None
    version: int | None = None
    metadata: dict[str, str] | None = None
    """Keys with the text that each must hold."""
    status: str | None = None

    def clauses(self, is_sqlite: bool) -> list[ColumnElement[bool]]:
        """The conditions of a WHERE clause.

        Raises:
            ValueError: a metadata key cannot be looked for.
        """
        found: list[Any] = []
        if self.policy is not None:
            found.append(Completion.policy == self.policy)
        if self.version is not None:
            found.append(Completion.version == self.version)
        if self.status is not None:
            found.append(Completion.status == self.status)
            if self.status != "complete":
                # The index of the few that are not is only taken where it is seen to fit.
                found.append(text("completions.status <> 'complete'"))
        if self.metadata:
            found.append(_holds(self.metadata, is_sqlite))
        return found


def _holds(metadata: dict[str, str], is_sqlite: bool) -> ColumnElement[bool]:
    column = Completion.client_metadata
    if not is_sqlite:
        return type_coerce(column, JSONB).contains(metadata)
    clauses: list[ColumnElement[bool]] = []
    for key, value in metadata.items():
        if '"' in key or "\\" in key:
            raise ValueError(f"the metadata key {key!r} holds a quote or a backslash")
        path = f'$."{key}"'
        # A number or an object may read like the text; PostgreSQL does not take it for it either.
        clauses.append(func.json_type(column, path) == "text")
        clauses.append(func.json_extract(column, path) == value)
    return and_(*clauses)


def ids(
    connection: Connection,
    project: str,
    chosen: Filter,
    *,
    after: str | None = None,
    limit: int,
    descending: bool = False,
) -> list[str]:
    """Ids of up to `limit` completions beyond `after`, the oldest first unless `descending`.

    Raises:
        ValueError: a metadata key cannot be looked for.
    """
    query = _ids(project, chosen, connection.dialect.name == "sqlite", after, descending)
    return list(connection.execute(query.limit(limit)).scalars())


def _ids(
    project: str, chosen: Filter, is_sqlite: bool, after: str | None, descending: bool
) -> Select[str]:
    query = select(Completion.id).where(Completion.project == project, *chosen.clauses(is_sqlite))
    if after is not None:
        query = query.where(Completion.id < after if descending else Completion.id > after)
    return query.order_by(Completion.id.desc() if descending else Completion.id)


def page(
    connection: Connection,
    project: str,
    chosen: Filter,
    *,
    after: str | None = None,
    limit: int,
    descending: bool = False,
) -> tuple[list[ListedCompletion], bool]:
    """A page of completions, and whether there are more behind it.

    Raises:
        ValueError: a metadata key cannot be looked for.
    """
    found = ids(connection, project, chosen, after=after, limit=limit + 1, descending=descending)
    columns = (
        Completion.id,
        Completion.trajectory_id,
        Completion.parent_id,
        Completion.policy,
        Completion.version,
        Completion.replica,
        Completion.status,
        Completion.http_status,
        Completion.reason,
        Completion.response,
        Completion.sampling,
        Completion.client_metadata,
        Completion.created_at,
        Completion.finished_at,
    )
    shown = found[:limit]
    rows: dict[str, Any] = {
        row["id"]: row
        for row in connection.execute(
            select(*columns).where(Completion.project == project, Completion.id.in_(shown))
        ).mappings()
    }
    return [_listed(rows[id]) for id in shown if id in rows], len(found) > limit


def _listed(row: Any) -> ListedCompletion:
    response = row["response"]
    values = dict(row, response=codec.decode_json(response) if response is not None else None)
    return ListedCompletion(**values)
