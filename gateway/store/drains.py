"""Replicas that are to get no new requests, whichever gateway is asked."""

import time

from sqlalchemy import Connection, delete, select
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.base import insert_into
from gateway.store.models import Base


class Drain(Base):
    """One replica, by its URL."""

    __tablename__ = "drains"

    url: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[float]


def read(connection: Connection) -> frozenset[str]:
    """The URLs of all that are drained."""
    return frozenset(connection.execute(select(Drain.url)).scalars())


def drain(connection: Connection, url: str) -> None:
    """Give a replica nothing new."""
    statement = insert_into(connection, Drain).values(url=url, since=time.time())
    connection.execute(statement.on_conflict_do_nothing())


def resume(connection: Connection, url: str) -> None:
    """Use a replica again."""
    connection.execute(delete(Drain).where(Drain.url == url))
