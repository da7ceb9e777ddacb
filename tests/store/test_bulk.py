"""Rows that the driver inserts itself are those that SQLAlchemy would have inserted."""

import pytest
from sqlalchemy import func, insert, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError

from gateway.store import Database
from gateway.store.bulk import BulkInsert
from gateway.store.models import Choice, Completion, Group, Trajectory
from gateway.store.records import CapturedChoice
from gateway.store.rows import encode
from tests.store.conftest import Captured


def bulk(database: Database, model: type) -> BulkInsert:
    dialect = sqlite if database.is_sqlite else postgresql
    return BulkInsert(dialect.insert(model).on_conflict_do_nothing())


def rows_of(database: Database, model: type) -> list:
    with database.read() as connection:
        rows = connection.execute(select(model.__table__)).all()
        nulls = ()
        if model is Completion:
            # What a JSON column holds for None is not seen in its value.
            null = func.count().filter(literal_column("client_metadata").is_(None))
            nulls = connection.execute(select(null).select_from(model.__table__)).scalar_one()
    return [sorted(rows, key=repr), nulls]


def odd(captured: Captured, number: int):
    choices = [
        CapturedChoice(0, "stop", [1, 70_000], [-0.25, -1e-9], b"\x00\xff'\"" * 4),
        CapturedChoice(1, None, None, None, None),
    ]
    return captured(
        f"t{number} ' \" \\ é 😀",
        client_metadata={"a": "\\u 😀", "b": "1"} if number % 2 else None,
        sampling={"temperature": 0.1, "seed": 2**63 - 1, "bad_words": ["\n"]},
        choices=choices[: 1 + number % 2],
        created_at=1_700_000_000.123456789 + number,
        reason=None if number % 3 else "biased_sampling",
    )


@pytest.mark.parametrize("count", [1, 2, 7, 200])
def test_they_are_the_same_row_for_row(database: Database, captured: Captured, count: int):
    encoded = [encode(odd(captured, number)) for number in range(count)]
    tables = {
        Group: [encoded[0].group],
        Trajectory: [item.trajectory for item in encoded],
        Completion: [item.completion for item in encoded],
        Choice: [choice for item in encoded for choice in item.choices],
    }
    with database.write() as connection:
        for model, rows in tables.items():
            connection.execute(insert(model), rows)
    wanted = {model: rows_of(database, model) for model in tables}
    with database.write() as connection:
        for model in reversed(tables):
            connection.execute(model.__table__.delete())
    with database.write() as connection:
        for model, rows in tables.items():
            bulk(database, model).run(connection, rows)
            bulk(database, model).run(connection, [])
            # And once more changes nothing.
            bulk(database, model).run(connection, rows)
    assert {model: rows_of(database, model) for model in tables} == wanted


def test_errors_are_sqlalchemys_and_leave_nothing(database: Database, captured: Captured):
    encoded = encode(captured())
    completions = bulk(database, Completion)
    with pytest.raises(IntegrityError), database.write() as connection:
        completions.run(connection, [encoded.completion])
    if not database.is_sqlite:
        bad = {**encoded.trajectory, "id": "a\x00b"}
        with pytest.raises(DBAPIError), database.write() as connection:
            bulk(database, Trajectory).run(connection, [bad])
    with database.write() as connection:
        bulk(database, Trajectory).run(connection, [encoded.trajectory])
        completions.run(connection, [encoded.completion])
    assert len(rows_of(database, Completion)[0]) == 1


def test_a_connection_that_is_lost_is_reported_as_lost(postgres, captured: Captured):
    database = Database(postgres.get_uri())
    database.migrate()
    trajectories = bulk(database, Trajectory)
    with pytest.raises(DBAPIError) as raised, database.write() as connection:
        connection.exec_driver_sql("SELECT 1")
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        with database.read() as other:
            other.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
        trajectories.run(connection, [encode(captured()).trajectory])
    assert raised.value.connection_invalidated
    with database.write() as connection:
        trajectories.run(connection, [encode(captured()).trajectory])
    database.dispose()
