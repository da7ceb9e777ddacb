"""Each revision runs on SQLite and PostgreSQL, up from the one before, with rows in it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, inspect, select, text

from gateway.store import Database, listing, queries, retention, undelivered
from gateway.store.baselines import Baseline
from gateway.store.models import Base, CompletionUse, Event, Trajectory, Webhook
from gateway.store.records import CapturedCompletion
from gateway.store.rows import encode
from gateway.store.tracing_models import (
    JudgeCall,
    JudgedGroup,
    LangfuseCursor,
    LangfuseScore,
    LangfuseTrace,
    Lease,
    OutboxEntry,
)
from tests.store.conftest import Captured

ELSEWHERE = {
    "sqlite": {"ix_completions_metadata_keys", "ix_completions_project"},
    "postgresql": {"ix_completions_metadata"},
}
"""The indexes that the other of the two databases has."""


def test_the_migrations_make_what_the_models_say(database: Database):
    with database.read() as connection:
        other = ELSEWHERE[connection.dialect.name]
        options = {
            "compare_type": True,
            "include_object": lambda _object, name, kind, *_: kind != "index" or name not in other,
        }
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []


def store_as_it_was(database: Database, item: CapturedCompletion) -> None:
    """Store a completion in a schema that lacks columns of today's."""
    rows = encode(item)
    with database.write() as connection:
        for table, values in (
            ("groups", [rows.group]),
            ("trajectories", [rows.trajectory]),
            ("completions", [rows.completion]),
            ("choices", rows.choices),
        ):
            known = {column["name"] for column in inspect(connection).get_columns(table)}
            for row in values:
                kept = {name: value for name, value in row.items() if name in known}
                connection.execute(insert(Base.metadata.tables[table]).values(kept))


def test_a_log_of_the_first_schema_is_listed_after_the_second(empty_url: str, captured: Captured):
    database = Database(empty_url)
    database.migrate("0001")
    items = [
        captured(f"t{n}", f"g{n}", client_metadata={"user": f"u{n}"}, first_token_at=n / 2)
        for n in range(5)
    ]
    for item in items:
        store_as_it_was(database, item)
    database.migrate("0002")
    chosen = listing.Filter(policy="agent", metadata={"user": "u3"})
    database.migrate()
    with database.read() as connection:
        page, _ = listing.page(connection, "default", chosen, limit=5)
        found = [queries.completion(connection, "default", item.id) for item in items]
    assert [item.id for item in page] == [items[3].id]
    for item, stored in zip(items, found, strict=True):
        for name in ("messages", "request", "prompt_ids", "first_token_at", "client_metadata"):
            assert getattr(stored, name) == getattr(item, name)
        assert [c.token_ids for c in stored.choices] == [c.token_ids for c in item.choices]
    database.dispose()


def test_events_of_before_are_there_when_webhooks_come(empty_url: str):
    database = Database(empty_url)
    database.migrate("0003")
    row = {"project": "p", "policy": "agent", "kind": "published", "detail": {"a": 1}, "at": 1.0}
    with database.write() as connection:
        connection.execute(insert(Event).values(version=1, **row))
    database.migrate("0004")
    with database.write() as connection:
        assert dict(connection.execute(select(Event.__table__)).mappings().one()) == {
            "id": 1,
            "version": 1,
            **row,
        }
        connection.execute(insert(Webhook).values(id="w", cursor=2**40, attempts=0))
        assert connection.execute(select(Webhook.cursor)).scalar_one() == 2**40
    database.dispose()


def test_policies_of_the_fourth_schema_go_on_under_the_fifth(empty_url: str):
    database = Database(empty_url)
    database.migrate("0004")
    with database.write() as connection:
        connection.exec_driver_sql(
            "insert into policies (project, name, base_model, base_served, alias, head, state, "
            "lora, settings, created_at) "
            "values ('default', 'agent', '/base', 'base', 1, 1, 'active', '{}', '{}', 1.0)"
        )
        for number, state in ((0, "retired"), (1, "serving")):
            connection.exec_driver_sql(
                "insert into versions (project, policy, number, state, created_at) "
                f"values ('default', 'agent', {number}, '{state}', 5.0)"
            )
    database.migrate("0005")
    with database.read() as connection:
        policy = queries.policy(connection, "default", "agent")
        found = queries.versions(connection, "default", "agent")
    assert (policy["rate_factor"], policy["strikes"], policy["canary"]) == (1.0, 0, None)
    assert [(v["looks"], v["ended_at"], v["deleted_at"]) for v in found] == [
        (0, 5.0, None),
        (0, None, None),
    ]
    database.dispose()


def test_what_was_logged_before_tracing_is_whole_after_it(empty_url: str, captured: Captured):
    database = Database(empty_url)
    database.migrate("0005")
    item = captured()
    store_as_it_was(database, item)
    reward = {"id": "reward-1", "project": "default", "trajectory_id": "t", "name": "reward"}
    with database.write() as connection:
        connection.execute(
            text(
                "INSERT INTO rewards (id, project, trajectory_id, name, reward, source, created_at)"
                " VALUES (:id, :project, :trajectory_id, :name, 0.5, 'api', 7)"
            ),
            reward,
        )
    database.migrate()
    with database.write() as connection:
        found = queries.trajectory(connection, "default", "t")
        for model in (Lease, OutboxEntry, LangfuseTrace, LangfuseCursor, LangfuseScore):
            assert connection.execute(select(model.__table__)).all() == []
        for number in range(2):
            added = connection.execute(
                insert(OutboxEntry)
                .values(project="default", kind="completion", ref=item.id, at=1.0)
                .returning(OutboxEntry.row)
            )
            assert added.scalar_one() == number + 1
        call = {"project": "p", "policy": "a", "group_id": "g", "key": b"k", "cost": 0.1, "at": 1.0}
        connection.execute(insert(JudgeCall).values(answer={"ranking": []}, **call))
        assert connection.execute(select(JudgeCall.answer)).scalar_one() == {"ranking": []}
        assert connection.execute(select(JudgedGroup.__table__)).all() == []
    assert found is not None
    assert [completion.traceparent for completion in found.completions] == [None]
    assert [(reward.id, reward.reward) for reward in found.rewards] == [("reward-1", 0.5)]
    database.dispose()


def test_what_was_trained_on_before_revisions_counts_as_settled(empty_url: str):
    database = Database(empty_url)
    database.migrate("0006")
    with database.write() as connection:
        for id, state in (("a", "open"), ("b", "used"), ("c", "skipped")):
            connection.exec_driver_sql(
                "insert into trajectories (project, id, policy, group_id, split, attribution, "
                "rewarded, state, created_at, updated_at) values "
                f"('default', '{id}', 'agent', 'g', 'train', 'path', true, '{state}', 1.0, 1.0)"
            )
        connection.exec_driver_sql(
            "insert into completion_uses (completion_id, choice, trajectory_id, group_id, tokens) "
            "values ('c1', 0, 'b', 'g', 3)"
        )
    database.migrate("0007")
    with database.read() as connection:
        columns = (Trajectory.id, Trajectory.revision, Trajectory.settled_revision)
        assert sorted(connection.execute(select(*columns)).tuples()) == [
            ("a", 0, None),
            ("b", 0, 0),
            ("c", 0, 0),
        ]
        use = connection.execute(select(CompletionUse.__table__)).mappings().one()
        assert connection.execute(select(Baseline.__table__)).all() == []
    assert (use["revision"], use["baseline"], use["ratio"]) == (0, None, None)
    database.dispose()


def test_a_log_of_before_is_listed_by_version_and_failure(empty_url: str, captured: Captured):
    database = Database(empty_url)
    database.migrate("0010")
    items = [
        captured(f"t{n}", f"g{n}", version=n % 2, status=("complete", "error", "aborted")[n % 3])
        for n in range(6)
    ]
    for item in items:
        store_as_it_was(database, item)
    database.migrate("0011")
    indexes = {index["name"] for index in inspect(database.engine).get_indexes("completions")}
    assert {"ix_completions_version", "ix_completions_failed"} <= indexes
    for chosen, expected in (
        (listing.Filter(policy="agent", version=1), items[1::2]),
        (listing.Filter(status="error"), [items[1], items[4]]),
        (listing.Filter(status="complete"), [items[0], items[3]]),
    ):
        with database.read() as connection:
            found = listing.ids(connection, "default", chosen, limit=9)
        assert found == sorted(item.id for item in expected)
    database.dispose()


def test_what_was_logged_before_rules_is_kept_until_there_is_one(
    empty_url: str, captured: Captured
):
    database = Database(empty_url)
    database.migrate("0011")
    store_as_it_was(database, captured())
    database.migrate("0012")
    with database.read() as connection:
        assert retention.read_all(connection) == {}
        assert queries.trajectory(connection, "default", "t") is not None
    for days in (30.0, None, 0.25):
        with database.write() as connection:
            retention.keep(connection, "default", days)
            retention.keep(connection, "other", 7.0)
        with database.read() as connection:
            assert retention.read_all(connection) == {"default": days, "other": 7.0}
    with database.write() as connection:
        retention.forget(connection, "default")
        assert retention.read_all(connection) == {"other": 7.0}
    database.dispose()


def test_what_was_answered_before_can_be_noted_as_undelivered(empty_url: str, captured: Captured):
    database = Database(empty_url)
    database.migrate("0012")
    item = captured()
    store_as_it_was(database, item)
    with database.write() as connection:
        retention.keep(connection, "default", 30.0)
    database.migrate("0013")
    with database.write() as connection:
        undelivered.keep(connection, "default", b"place", item.id, 1e9)
        taken = undelivered.take(connection, "default", [b"place"], 1e9)
        assert taken == {b"place": item.id}
        assert queries.completion(connection, "default", item.id).messages == item.messages
        assert retention.read_all(connection) == {"default": 30.0}
    database.dispose()


def test_migrating_twice_changes_nothing(database: Database):
    database.migrate()
    with database.read() as connection:
        assert "completions" in inspect(connection).get_table_names()


def test_processes_that_start_together_may_all_migrate(empty_url: str):
    databases = [Database(empty_url) for _ in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda database: database.migrate(), databases))
    for database in databases:
        database.dispose()


def test_a_url_of_another_kind_is_refused_in_words():
    with pytest.raises(ValueError, match="neither SQLite nor PostgreSQL"):
        Database("mysql://user:secret@host/name")
