"""A store, and senders from it to a fake Langfuse."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store import Database
from gateway.store.models import DEFAULT_PROJECT
from gateway.store.writer import Writer
from gateway.tracing.exporter import Exporter
from gateway.tracing.sender import Sender
from gateway.tracing.settings import LangfuseProject
from gateway.tracing.writes import Writes
from tests.fake_langfuse import FakeLangfuse
from tests.fake_vllm import FakeVllm
from tests.store.conftest import captured as captured
from tests.store.conftest import empty_url as empty_url
from tests.store.conftest import postgres as postgres

PAGE = "http://strop.test"


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with tables and nothing in them; a copy costs less than the migrations."""
    path = tmp_path_factory.mktemp("migrated") / "strop.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    with database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    database.dispose()
    return path


@pytest.fixture
def database(tmp_path: Path, migrated: Path) -> Iterator[Database]:
    shutil.copy(migrated, tmp_path / "strop.db")
    found = Database(f"sqlite:///{tmp_path / 'strop.db'}")
    yield found
    found.dispose()


@pytest.fixture
async def writer(database: Database) -> AsyncIterator[Writer]:
    found = Writer(database, traced=[DEFAULT_PROJECT])
    found.start()
    yield found
    await found.close()


@pytest.fixture
async def langfuse() -> AsyncIterator[FakeLangfuse]:
    async with FakeLangfuse() as found:
        yield found
        assert found.problems == []


def keys(langfuse: FakeLangfuse, **options: Any) -> LangfuseProject:
    values = {"public_key": langfuse.public_key, "secret_key": langfuse.secret_key}
    return LangfuseProject(**{"base_url": langfuse.url, **values, **options})


def environment(
    folder: Path, base: Path, vllm: FakeVllm, port: int, langfuse: FakeLangfuse
) -> dict[str, str]:
    """Of a gateway that is a process of its own, on a port."""
    return {
        **os.environ,
        "STROP_DATA_DIR": str(folder / "strop"),
        "STROP_REPLICAS": f'["{vllm.url}"]',
        "STROP_BASE_MODEL": str(base),
        "STROP_PUBLISH_POLL": "0.05",
        "STROP_PORT": str(port),
        "STROP_LANGFUSE__SEND_SECONDS": "0.05",
        "LANGFUSE_PUBLIC_KEY": langfuse.public_key,
        "LANGFUSE_SECRET_KEY": langfuse.secret_key,
        "LANGFUSE_BASE_URL": langfuse.url,
    }


MakeSender = Callable[..., Sender]


@pytest.fixture
def make_sender(database: Database, langfuse: FakeLangfuse) -> Iterator[MakeSender]:
    exporters = []

    def make(batch: int = 200, **options: Any) -> Sender:
        exporters.append(Exporter(keys(langfuse, **options), timeout=5.0))
        found = Sender(Writes(database), DEFAULT_PROJECT, exporters[-1], PAGE, batch)
        found.start()
        return found

    yield make
    for exporter in exporters:
        exporter.close()


@pytest.fixture
def sender(make_sender: MakeSender) -> Sender:
    return make_sender()


async def drain(sender: Sender) -> None:
    """Send all there is, however often it takes."""

    def all_of_it() -> None:
        from gateway.store import outbox

        for _ in range(1000):
            sender.not_before = 0.0
            sender.step()
            with sender._database.read() as connection:
                if not outbox.pending(connection, sender.project, 1):
                    return
        raise AssertionError("the outbox did not get empty")

    await asyncio.to_thread(all_of_it)
