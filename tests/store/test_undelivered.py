"""What was not delivered is taken once, by one, within its time; on SQLite and PostgreSQL."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from gateway.store import Database, deletion, undelivered
from gateway.store.undelivered import KEPT_SECONDS, Undelivered
from gateway.store.writer import Writer
from tests.store.conftest import Captured

NOW = 1e9
PLACE, OTHER = b"\x00place", b"other place"


def keep(database: Database, id: str, project: str = "default", now: float = NOW) -> None:
    with database.write() as connection:
        undelivered.keep(connection, project, PLACE, id, now)


def take(database: Database, project: str = "default", now: float = NOW) -> str | None:
    with database.read() as connection:
        there = undelivered.any_kept(connection, project, [OTHER, PLACE], now)
    with database.write() as connection:
        taken = undelivered.take(connection, project, [OTHER, PLACE], now)
    assert there is bool(taken)
    return taken.get(PLACE)


async def test_each_is_taken_once_by_its_own_project(
    database: Database, writer: Writer, captured: Captured
):
    ours, theirs, newer = captured(), captured(project="other"), captured()
    for item in (ours, theirs, newer):
        await writer.store(item)
    keep(database, ours.id)
    keep(database, theirs.id, "other")
    assert [take(database), take(database), take(database, "other")] == [ours.id, None, theirs.id]
    # Of two answers to the same request the newer one is the client's.
    keep(database, ours.id)
    keep(database, newer.id, now=NOW + 1)
    assert [take(database), take(database)] == [newer.id, None]


async def test_of_many_that_ask_at_once_one_gets_it(
    database: Database, writer: Writer, captured: Captured
):
    item = captured()
    await writer.store(item)
    for _ in range(5):
        keep(database, item.id)

        def ask(_: int) -> str | None:
            with database.write() as connection:
                return undelivered.take(connection, "default", [PLACE], NOW).get(PLACE)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert sorted(filter(None, answers)) == [item.id]


async def test_of_several_places_each_has_its_own(
    database: Database, writer: Writer, captured: Captured
):
    items = [captured() for _ in range(3)]
    for index, item in enumerate(items):
        await writer.store(item)
        with database.write() as connection:
            undelivered.keep(connection, "default", b"%d" % index, item.id, NOW)
    with database.write() as connection:
        taken = undelivered.take(connection, "default", [b"2", b"0", OTHER], NOW)
    assert taken == {b"0": items[0].id, b"2": items[2].id}
    with database.read() as connection:
        assert undelivered.any_kept(connection, "default", [b"1"], NOW)
        assert not undelivered.any_kept(connection, "default", [b"0", b"2"], NOW)


async def test_what_is_too_old_is_neither_taken_nor_kept(
    database: Database, writer: Writer, captured: Captured
):
    item = captured()
    await writer.store(item)
    keep(database, item.id)
    assert take(database, now=NOW + KEPT_SECONDS + 1) is None
    assert take(database, now=NOW + KEPT_SECONDS - 1) == item.id
    keep(database, item.id)
    keep(database, item.id, "other", now=NOW + KEPT_SECONDS + 1)
    with database.read() as connection:
        left = select(Undelivered.project, func.count()).group_by(Undelivered.project)
        assert connection.execute(left).tuples().all() == [("other", 1)]


async def test_a_completion_is_deleted_with_what_was_noted_of_it(
    database: Database, writer: Writer, captured: Captured
):
    item = captured()
    await writer.store(item)
    keep(database, item.id)
    with database.write() as connection:
        deletion.delete_completions(connection, "default", [item.id])
    assert take(database) is None
    with pytest.raises(IntegrityError):
        keep(database, "chatcmpl-that-is-not-there")
