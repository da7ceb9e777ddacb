"""Answers that are in the log and never reached their client, by what its retry will say.

Hardly any answer is one, so the table is small; whoever adds to it deletes what is too old.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, ForeignKey, Index, delete, select
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.base import Base, insert_into

KEPT_SECONDS = 600.0
"""For which a client may come back for an answer."""


class Undelivered(Base):
    """One such answer."""

    __tablename__ = "undelivered"

    project: Mapped[str] = mapped_column(primary_key=True)
    place: Mapped[bytes] = mapped_column(primary_key=True)
    """Digest of the request's idempotency key, its body, and which part of it was answered."""
    completion_id: Mapped[str] = mapped_column(ForeignKey("completions.id", ondelete="CASCADE"))
    kept_at: Mapped[float]

    __table_args__ = (Index("ix_undelivered_completion", "completion_id"),)


def keep(
    connection: Connection, project: str, place: bytes, completion_id: str, now: float
) -> None:
    """Remember that a completion, which is in the database, was not delivered.

    Args:
        now: Unix seconds.
    """
    answer = {"completion_id": completion_id, "kept_at": now}
    connection.execute(delete(Undelivered).where(Undelivered.kept_at < now - KEPT_SECONDS))
    connection.execute(
        insert_into(connection, Undelivered)
        .values(project=project, place=place, **answer)
        .on_conflict_do_update(index_elements=["project", "place"], set_=answer)
    )


def _there(project: str, places: Sequence[bytes], now: float) -> tuple[Any, ...]:
    return (
        Undelivered.project == project,
        Undelivered.place.in_(places),
        Undelivered.kept_at >= now - KEPT_SECONDS,
    )


def any_kept(connection: Connection, project: str, places: Sequence[bytes], now: float) -> bool:
    """Whether there is something to take."""
    found = connection.execute(
        select(Undelivered.completion_id).where(*_there(project, places, now)).limit(1)
    )
    return found.first() is not None


def take(
    connection: Connection, project: str, places: Sequence[bytes], now: float
) -> dict[bytes, str]:
    """The ids of the completions by their places; of all that ask, one gets each."""
    taken = connection.execute(
        delete(Undelivered)
        .where(*_there(project, places, now))
        .returning(Undelivered.place, Undelivered.completion_id)
    )
    return dict(taken.tuples().all())
