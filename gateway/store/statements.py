"""The statements that store completions, many at a time."""

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store import waiting
from gateway.store.bulk import BulkInsert
from gateway.store.models import Base, Choice, Completion, Group, Trajectory
from gateway.store.rows import EncodedCompletion, Row

_MARK_CONTINUED = (
    update(Choice)
    .where(Choice.completion_id == bindparam("b_completion"), Choice.index == bindparam("b_index"))
    .values(continued=True)
)


class Statements:
    """The multi-row statements that store completions, compiled for one dialect."""

    def __init__(self, is_sqlite: bool):
        insert: Callable[[type[Base]], Any] = sqlite.insert if is_sqlite else postgresql.insert
        newest = func.max if is_sqlite else func.greatest
        trajectory = insert(Trajectory)
        self.trajectory = BulkInsert(
            trajectory.on_conflict_do_update(
                index_elements=["project", "id"],
                set_={"updated_at": newest(Trajectory.updated_at, trajectory.excluded.updated_at)},
            )
        )
        group = insert(Group)
        began, oldest = group.excluded.oldest_at, func.min if is_sqlite else func.least
        self.group = BulkInsert(
            group.on_conflict_do_update(
                index_elements=["project", "policy", "id"],
                set_={
                    "updated_at": newest(Group.updated_at, group.excluded.updated_at),
                    # If this turn is of an episode that was trained on, nobody waits: too early a
                    # time only costs a look.
                    "oldest_at": func.coalesce(
                        oldest(Group.oldest_at, began), Group.oldest_at, began
                    ),
                },
            )
        )
        self.completion = BulkInsert(insert(Completion).on_conflict_do_nothing())
        self.choice = BulkInsert(insert(Choice).on_conflict_do_nothing())

    def insert(self, connection: Connection, encoded: list[EncodedCompletion]) -> None:
        """Store completions, and mark what they continue."""
        # Groups before trajectories: in the order in which a trainer that ends a step locks them.
        self.group.run(connection, _last(e.group for e in encoded if e.group))
        self.trajectory.run(connection, _last(e.trajectory for e in encoded))
        # A sub-agent may have its reward before it begins: its parent's.
        waiting.count(
            connection,
            {
                (e.group["project"], e.group["policy"], e.group["id"])
                for e in encoded
                if e.group and e.trajectory["parent_id"] is not None
            },
        )
        _detach_orphans(connection, encoded)
        self.completion.run(connection, [e.completion for e in encoded])
        self.choice.run(connection, [choice for e in encoded for choice in e.choices])
        continued = [e.continued for e in encoded if e.continued]
        if continued:
            connection.execute(_MARK_CONTINUED, continued)


def _detach_orphans(connection: Connection, encoded: list[EncodedCompletion]) -> None:
    # A turn may be deleted while the next one is being answered. Asked only after the upsert of
    # the trajectories, which a deletion locks: from here on nobody deletes a parent.
    parents = {e.completion["parent_id"] for e in encoded} - {None}
    if not parents:
        return
    query = select(Completion.id).where(Completion.id.in_(parents))
    there = set(connection.execute(query).scalars()) | {e.completion["id"] for e in encoded}
    for item in encoded:
        if item.completion["parent_id"] in parents - there:
            item.detach()


def _last(rows: Iterable[Row]) -> list[Row]:
    # One row a key, the last; in the order of keys, so that two gateways never wait for each
    # other's row locks in a circle.
    unique = {(row["project"], row["policy"], row["id"]): row for row in rows}
    return [unique[key] for key in sorted(unique)]
