"""One SQLAlchemy engine for SQLite or PostgreSQL, and the migrations that bring it up to date."""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine import URL

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"

_LIMITS = {
    "connect_timeout": 3,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""Of connections to PostgreSQL: seconds, and milliseconds for the last. Without them the driver
waits for minutes for a host that has vanished."""


class Database:
    """The trajectory database.

    `write()` gives a connection in a transaction. On SQLite it takes the lock at once (`BEGIN
    IMMEDIATE`), so that it waits at its beginning and never fails in its middle. `read()` has a
    transaction on SQLite alone: on PostgreSQL each statement sees what is committed when it begins
    either way, and beginning and ending a transaction are two more round trips.
    Calls block: on an event loop they belong in a thread.
    """

    def __init__(self, url: str):
        self.url = _driver_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _create_engine(self.url)
        self._write_engine = self.engine.execution_options(strop_write=True)
        options: dict[str, Any] = {} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        self._read_engine = self.engine.execution_options(**options)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading alone."""
        with self._read_engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A connection whose changes are committed if the block succeeds."""
        with self._write_engine.begin() as connection:
            yield connection

    @contextmanager
    def write_on(self, connection: Connection, *, durable: bool = True) -> Iterator[None]:
        """The same on a connection of `read()`: what looks first, then changes, then looks again
        need not ask the pool three times.

        Args:
            durable: False does not wait for PostgreSQL's disk: if the server crashes in the same
                moment, it is as if the transaction had never been.
        """
        connection.rollback()
        self._change(connection, write=True)
        try:
            with connection.begin():
                if not (durable or self.is_sqlite):
                    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                yield
        finally:
            self._change(connection, write=False)

    def _change(self, connection: Connection, *, write: bool) -> None:
        if self.is_sqlite:
            connection.execution_options(strop_write=write)
        else:
            level = connection.default_isolation_level if write else "AUTOCOMMIT"
            connection.execution_options(isolation_level=level)

    def connect_to_write(self) -> Connection:
        """A connection to be kept, whose every transaction is one of `write()`."""
        return self._write_engine.connect()

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema to `revision`, under a lock, so that several processes may ask."""
        if self.is_sqlite and self.url.database and self.url.database != ":memory:":
            Path(self.url.database).parent.mkdir(parents=True, exist_ok=True)
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        with self.write() as connection:
            if not self.is_sqlite:
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(7237461)")
            config.attributes["connection"] = connection
            command.upgrade(config, revision)

    def dispose(self) -> None:
        """Close all pooled connections."""
        self.engine.dispose()


def _driver_url(url: str) -> URL:
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ValueError(
            f"database_url {parsed.render_as_string()!r} is neither SQLite nor PostgreSQL; "
            "use sqlite:///path/to/file or postgresql://user:password@host/name"
        )
    return parsed


class NotStorable(ValueError):
    """A value that no column holds, such as a whole number of more than 64 bits."""


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def _to_json(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError as error:
        raise NotStorable(str(error)) from error
    # PostgreSQL's JSON has no character 0, for the sake of which nothing that was sampled is lost.
    return _NUL.sub(r"\1\\ufffd", text) if "\\u0000" in text else text


_WAL_SECONDS = 60.0


def _use_wal(connection: Any) -> None:
    """Turn a SQLite file to write-ahead logging, once; several processes may begin to at a time."""
    until = time.monotonic() + _WAL_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # For those that turn it at the same moment SQLite does not wait by itself.
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > until:
                raise
            time.sleep(0.01)


_SQLITE = {"check_same_thread": False, "timeout": 60, "cached_statements": 256}


def _create_engine(url: URL) -> Engine:
    options: dict[str, Any] = {
        "json_serializer": _to_json,
        "json_deserializer": orjson.loads,
        "pool_pre_ping": url.get_backend_name() != "sqlite",
        # They hold prompts, and errors are logged.
        "hide_parameters": True,
    }
    if url.get_backend_name() != "sqlite":
        # What the URL says itself wins.
        limits = {name: value for name, value in _LIMITS.items() if name not in url.query}
        return create_engine(url, **options, connect_args=limits, pool_size=10, max_overflow=20)
    engine = create_engine(url, **options, connect_args=_SQLITE)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        # The driver must not begin transactions by itself: `begin` below does.
        connection.isolation_level = None
        _use_wal(connection)
        for pragma in (
            "synchronous=FULL",
            "busy_timeout=60000",
            "foreign_keys=ON",
            # A statement of several rows keeps what it may have to undo; not in a file of its own.
            "temp_store=MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("strop_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine
