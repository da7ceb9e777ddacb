"""Pages of completions, and what they are filtered by, on SQLite and PostgreSQL."""

import asyncio

import pytest
from sqlalchemy import event

from gateway.store import Database, listing
from gateway.store.writer import Writer
from tests.store.conftest import Captured
from tests.store.test_deletion import PROJECT, write_thread


async def test_completions_are_listed_by_page_in_both_directions(
    database: Database, writer: Writer, captured: Captured
):
    ids = await write_thread(writer, captured, 7)

    def pages(descending: bool) -> list[list[str]]:
        found, after, more = [], None, True
        while more:
            with database.read() as connection:
                page, more = listing.page(
                    connection,
                    PROJECT,
                    listing.Filter(),
                    after=after,
                    limit=3,
                    descending=descending,
                )
            found.append([item.id for item in page])
            after = found[-1][-1]
        return found

    assert pages(False) == [ids[:3], ids[3:6], ids[6:]]
    assert pages(True) == [ids[:3:-1], ids[3:0:-1], ids[:1]]


METADATA = {
    "plain": {"user": "ada", "n": 5},
    "odd": {"user": "it's", "a.b": "[x]", "é": "ü", "": "empty"},
    "number": {"user": 5, "n": "5", "object": {"a": 1}},
    "none": None,
}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"user": "ada"}, ["plain"]),
        ({"user": "it's"}, ["odd"]),
        ({"a.b": "[x]"}, ["odd"]),
        ({"é": "ü", "user": "it's"}, ["odd"]),
        ({"": "empty"}, ["odd"]),
        ({"n": "5"}, ["number"]),
        ({"user": "5"}, []),
        ({"object": '{"a":1}'}, []),
        ({"user": "ada", "n": "5"}, []),
        ({"nothing": "x"}, []),
    ],
)
async def test_metadata_matches_text_alone(
    database: Database, writer: Writer, captured: Captured, metadata, expected
):
    for name, value in METADATA.items():
        await writer.store(captured(name, client_metadata=value))
    with database.read() as connection:
        page, _ = listing.page(connection, PROJECT, listing.Filter(metadata=metadata), limit=10)
    assert [item.trajectory_id for item in page] == expected


@pytest.mark.parametrize(
    ("chosen", "index"),
    [
        (listing.Filter(metadata={"user": "u7"}), "ix_completions_metadata"),
        (listing.Filter(policy="rare"), "ix_completions_policy"),
    ],
)
async def test_a_filter_has_an_index(
    database: Database, writer: Writer, captured: Captured, chosen, index
):
    items = [captured(f"t{n}", client_metadata={"user": f"u{n}"}) for n in range(3000)]
    await asyncio.gather(*map(writer.store, items))
    with database.write() as connection:
        connection.exec_driver_sql("ANALYZE completions")
    plan: list[str] = []

    def explain(connection, cursor, statement, parameters, context, many):
        cursor.execute(f"EXPLAIN {'QUERY PLAN ' * database.is_sqlite}{statement}", parameters)
        plan.extend(map(str, cursor.fetchall()))

    with database.read() as connection:
        event.listen(connection, "before_cursor_execute", explain)
        listing.ids(connection, PROJECT, chosen, limit=20, descending=True)
    assert index in "".join(plan), plan
