"""How long the log of a project is kept, where the project has said so itself."""

import time

from sqlalchemy import Connection, delete, select
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.base import Base, insert_into


class Retention(Base):
    """One project's rule; a project without a row has that of the settings."""

    __tablename__ = "retention"

    project: Mapped[str] = mapped_column(primary_key=True)
    days: Mapped[float | None]
    """After its last completion or reward a trajectory is kept for so long; null: for ever."""
    changed_at: Mapped[float]


def read_all(connection: Connection) -> dict[str, float | None]:
    """Days by project, of those that have a rule."""
    rows = connection.execute(select(Retention.project, Retention.days)).tuples()
    return dict(rows.all())


def keep(connection: Connection, project: str, days: float | None) -> None:
    """Give a project its rule; None: for ever."""
    rule = {"days": days, "changed_at": time.time()}
    connection.execute(
        insert_into(connection, Retention)
        .values(project=project, **rule)
        .on_conflict_do_update(index_elements=["project"], set_=rule)
    )


def forget(connection: Connection, project: str) -> None:
    """Let a project have the rule of the settings again."""
    connection.execute(delete(Retention).where(Retention.project == project))
