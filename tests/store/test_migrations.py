"""Each revision runs on SQLite and PostgreSQL, up from the one before, with rows in it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from gateway.store import Database
from gateway.store.models import Base


def test_the_migrations_make_what_the_models_say(database: Database):
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


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
