"""Gateways' writers that share a process, on SQLite and on a real PostgreSQL."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.store import Database
from gateway.workers import Worker
from gateway.writing.shared import SharedWriter
from tests.store import conftest as store

postgres, empty_url, database, captured = (
    store.postgres,
    store.empty_url,
    store.database,
    store.captured,
)

Share = Callable[..., Any]


@pytest.fixture
def share(database: Database, tmp_path: Path) -> Share:
    """`async with share()`: a writer whose process is one of its own, or with `workers=2` shared
    with the others."""

    @asynccontextmanager
    async def make(
        workers: int = 1,
        limit: int = 10_000,
        traced: tuple[str, ...] = (),
        kind: type[SharedWriter] = SharedWriter,
    ) -> AsyncIterator[SharedWriter]:
        worker = Worker(tmp_path / "data", workers)
        writer = kind(database, worker, 512, limit, 7.0, traced)
        writer.start()
        try:
            yield writer
        finally:
            await writer.close()
            worker.close()

    return make
