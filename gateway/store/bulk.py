"""INSERT of many rows in one statement, by the driver itself.

SQLAlchemy says what the statement is. It is compiled once and then run with all rows at a time: on
SQLite as one VALUES list, in which the rows cost one entry into the database instead of one each,
on PostgreSQL as one JSON document that the server takes apart. Errors come out as SQLAlchemy's.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import orjson
from sqlalchemy import JSON, Connection, Dialect, Insert, LargeBinary, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from gateway.store.models import Base

Row = dict[str, Any]

_SIZES = (64, 32, *range(16, 0, -1))
"""Rows of one statement on SQLite: few enough texts for all to stay prepared, and one statement for
what usually comes together, since each of them hands the interpreter's lock to and fro."""

_MOST_BYTES = 100 * 2**20
"""Of one JSON document on PostgreSQL, which takes up to 256 MiB."""


class BulkInsert:
    """One INSERT … ON CONFLICT, for rows that all have the same columns."""

    def __init__(self, statement: Insert):
        self._statement = statement
        self._ways: dict[tuple[str, ...], Callable[[Connection, Sequence[Row]], None]] = {}

    def run(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Insert rows.

        Raises:
            sqlalchemy.exc.DBAPIError: what the database refuses.
        """
        if not rows:
            return
        names = tuple(rows[0])
        way = self._ways.get(names)
        if way is None:
            build = _sqlite if connection.dialect.name == "sqlite" else _postgresql
            way = self._ways[names] = build(self._statement, names, connection.dialect)
        with driver_errors(connection):
            way(connection, rows)


def new_rows(table: type[Base]) -> dict[str, BulkInsert]:
    """By dialect, the insert of those rows of a table that are not there yet."""
    inserts: dict[str, Callable[[type[Base]], Any]] = {
        "sqlite": sqlite.insert,
        "postgresql": postgresql.insert,
    }
    return {
        name: BulkInsert(insert(table).on_conflict_do_nothing()) for name, insert in inserts.items()
    }


def driver(connection: Connection) -> Any:
    """The driver's own connection."""
    return connection.connection.driver_connection


@contextmanager
def driver_errors(connection: Connection) -> Iterator[None]:
    """Make SQLAlchemy's errors of the driver's, and tell it of a connection that is lost."""
    dialect = connection.dialect
    assert dialect.dbapi is not None
    base: type[Exception] = dialect.dbapi.Error
    try:
        yield
    except base as error:
        lost = dialect.is_disconnect(error, connection.connection, None)  # type: ignore[arg-type]
        wrapped = DBAPIError.instance(
            None, None, error, base, connection_invalidated=lost, dialect=dialect
        )
        if lost:
            connection.invalidate(error)
        raise wrapped from error


def _parts(
    statement: Insert, names: tuple[str, ...], dialect: Dialect
) -> tuple[str, tuple[str, ...], str]:
    """The statement up to its VALUES, the columns in their order, and what comes after."""
    compiled = statement.compile(dialect=dialect, column_keys=list(names))
    text = str(compiled)
    start, end = text.index(" VALUES ("), text.index(" ON CONFLICT")
    columns = text[:start].split("(", 1)[1].rstrip(")").split(", ")
    order = tuple(column.strip('"') for column in columns)
    # A bound value behind VALUES would have no place in what is built from this.
    assert len(compiled.params) == len(order), text
    return text[:start], order, text[end:]


def _reader(table: Table, names: tuple[str, ...], order: tuple[str, ...]) -> Callable[[Row], Any]:
    """Row → values in the order of the statement, with the defaults of columns it lacks."""
    missing = {name: table.c[name].default.arg for name in order if name not in names}  # type: ignore[union-attr]
    get = itemgetter(*order)
    if not missing:
        return get
    return lambda row: get({**missing, **row})


def _sqlite(
    statement: Insert, names: tuple[str, ...], dialect: Dialect
) -> Callable[[Connection, Sequence[Row]], None]:
    head, order, tail = _parts(statement, names, dialect)
    table = _table(statement)
    read = _reader(table, names, order)
    json = [
        (place, table.c[name].type.dialect_impl(dialect).bind_processor(dialect))
        for place, name in enumerate(order)
        if isinstance(table.c[name].type.dialect_impl(dialect), JSON)
    ]
    one = f"({', '.join('?' * len(order))})"
    texts = {size: f"{head} VALUES {', '.join([one] * size)}{tail}" for size in _SIZES}

    def values(row: Row) -> Sequence[Any]:
        found = read(row)
        if not json:
            return found  # type: ignore[no-any-return]
        found = list(found)
        for place, process in json:
            found[place] = process(found[place]) if process is not None else found[place]
        return found

    def run(connection: Connection, rows: Sequence[Row]) -> None:
        execute = driver(connection).execute
        flat = [values(row) for row in rows]
        start = 0
        for size in _SIZES:
            while len(flat) - start >= size:
                execute(texts[size], tuple(chain.from_iterable(flat[start : start + size])))
                start += size

    return run


def _postgresql(
    statement: Insert, names: tuple[str, ...], dialect: Dialect
) -> Callable[[Connection, Sequence[Row]], None]:
    head, order, tail = _parts(statement, names, dialect)
    table = _table(statement)
    quote = dialect.identifier_preparer.quote
    values, kinds = [], []
    for name in order:
        column, kind = quote(name), table.c[name].type
        if isinstance(kind, LargeBinary):
            values.append(f"decode(r.{column}, 'base64')")
            kinds.append(f"{column} text")
        elif isinstance(kind.dialect_impl(dialect), JSON):
            # As SQLAlchemy has it: None is JSON's null.
            values.append(f"coalesce(r.{column}, 'null')")
            kinds.append(f"{column} jsonb")
        else:
            values.append(f"r.{column}")
            kinds.append(f"{column} {kind.compile(dialect)}")
    text = (
        f"{head} SELECT {', '.join(values)} FROM jsonb_to_recordset(%s::jsonb) "
        f"AS r({', '.join(kinds)}){tail}"
    )
    missing = {name: table.c[name].default.arg for name in order if name not in names}  # type: ignore[union-attr]

    def run(connection: Connection, rows: Sequence[Row]) -> None:
        data = as_json([{**missing, **row} for row in rows] if missing else rows)
        if len(data) > _MOST_BYTES and len(rows) > 1:
            run(connection, rows[: len(rows) // 2])
            run(connection, rows[len(rows) // 2 :])
        else:
            driver(connection).execute(text, (data,), prepare=True)

    return run


def as_json(rows: Sequence[Row]) -> str:
    """Rows as the text of a JSON array; bytes in base64."""
    return orjson.dumps(rows, default=_encoded).decode()


def _encoded(value: Any) -> str:
    if isinstance(value, bytes):
        return b64encode(value).decode()
    raise TypeError(type(value).__name__)


def _table(statement: Insert) -> Table:
    table = statement.table
    assert isinstance(table, Table)
    return table
