"""Group commit: everything that is written at about the same time shares one transaction."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Insert, bindparam, func, update
from sqlalchemy.dialects import postgresql, sqlite

from gateway.store.database import Database
from gateway.store.models import Base, Choice, Completion, Group, Trajectory
from gateway.store.records import CapturedCompletion, Tail
from gateway.store.rows import EncodedCompletion, Row, encode

T = TypeVar("T")
Operation = Callable[[Connection], Any]
_Item = tuple[EncodedCompletion | Operation, "Future[Any]"]

_MARK_CONTINUED = (
    update(Choice)
    .where(Choice.completion_id == bindparam("b_completion"), Choice.index == bindparam("b_index"))
    .values(continued=True)
)


class QueueFull(Exception):
    """More writes wait for a commit than the settings allow."""


class Writer:
    """Commits completions and other writes in the order of their arrival.

    A thread of its own takes whatever has gathered while the last commit ran, writes it with a
    few multi-row statements and commits once. A caller goes on when its own write is durable. A
    write that fails alone fails only its caller: the batch is then repeated one by one.
    """

    def __init__(self, database: Database, batch: int = 512, limit: int = 10_000):
        self._database = database
        self._batch = batch
        self._limit = limit
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._pending = 0
        self._statements = _Statements(database.is_sqlite)
        self._thread = threading.Thread(target=self._run, name="strop-writer", daemon=True)
        self.commits = 0
        self.writes = 0

    def start(self) -> None:
        """Begin to commit."""
        self._thread.start()

    async def close(self) -> None:
        """Commit what is waiting and end the thread."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def full(self) -> bool:
        """Whether a further write would be refused."""
        return self._pending >= self._limit

    async def store(self, captured: CapturedCompletion) -> dict[bytes, Tail]:
        """Store a completion; returns, once it is durable, its tails by thread key.

        Raises:
            QueueFull: nothing was stored; the client should come back later.
        """
        encoded = encode(captured)
        await self._submit(encoded)
        return encoded.tails

    async def run(self, operation: Callable[[Connection], T]) -> T:
        """Run `operation` inside the shared transaction; returns its result once durable.

        It must be safe to repeat: when another write of the batch fails it is run once more.
        """
        return cast(T, await self._submit(operation))

    async def _submit(self, work: EncodedCompletion | Operation) -> Any:
        if self.full:
            raise QueueFull(f"{self._pending} writes are waiting for a commit")
        self._pending += 1
        future: Future[Any] = Future()
        self._queue.put((work, future))
        try:
            # A client that hangs up does not take its row with it.
            return await asyncio.shield(asyncio.wrap_future(future))
        finally:
            self._pending -= 1

    def _run(self) -> None:
        while True:
            items, ended = self._gather()
            if items:
                self._commit(items)
            if ended:
                return

    def _gather(self) -> tuple[list[_Item], bool]:
        first = self._queue.get()
        if first is None:
            return [], True
        items = [first]
        while len(items) < self._batch and not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return items, True
            items.append(item)
        return items, False

    def _commit(self, items: list[_Item]) -> None:
        try:
            results = self._transaction([work for work, _ in items])
        except Exception as error:
            if len(items) == 1:
                items[0][1].set_exception(error)
                return
            for item in items:
                self._commit([item])
            return
        for (_, future), result in zip(items, results, strict=True):
            future.set_result(result)

    def _transaction(self, works: list[EncodedCompletion | Operation]) -> list[Any]:
        with self._database.write() as connection:
            encoded = [work for work in works if isinstance(work, EncodedCompletion)]
            if encoded:
                self._statements.insert(connection, encoded)
            # Operations come last: they may refer to the completions of this very batch.
            results = [
                None if isinstance(work, EncodedCompletion) else work(connection) for work in works
            ]
        self.commits += 1
        self.writes += len(works)
        return results


class _Statements:
    """The multi-row statements that store completions, compiled for one dialect."""

    def __init__(self, is_sqlite: bool):
        insert: Callable[[type[Base]], Any] = sqlite.insert if is_sqlite else postgresql.insert
        newest = func.max if is_sqlite else func.greatest
        trajectory = insert(Trajectory)
        self.trajectory: Insert = trajectory.on_conflict_do_update(
            index_elements=["project", "id"],
            set_={"updated_at": newest(Trajectory.updated_at, trajectory.excluded.updated_at)},
        )
        group = insert(Group)
        self.group: Insert = group.on_conflict_do_update(
            index_elements=["project", "policy", "id"],
            set_={"updated_at": newest(Group.updated_at, group.excluded.updated_at)},
        )
        self.completion: Insert = insert(Completion).on_conflict_do_nothing()
        self.choice: Insert = insert(Choice).on_conflict_do_nothing()

    def insert(self, connection: Connection, encoded: list[EncodedCompletion]) -> None:
        connection.execute(self.trajectory, _last(e.trajectory for e in encoded))
        groups = _last(e.group for e in encoded if e.group)
        if groups:
            connection.execute(self.group, groups)
        connection.execute(self.completion, [e.completion for e in encoded])
        choices = [choice for e in encoded for choice in e.choices]
        if choices:
            connection.execute(self.choice, choices)
        continued = [e.continued for e in encoded if e.continued]
        if continued:
            connection.execute(_MARK_CONTINUED, continued)


def _last(rows: Iterable[Row]) -> list[Row]:
    # One row a key, the last; in the order of keys, so that two gateways never wait for each
    # other's row locks in a circle.
    unique = {(row["project"], row["policy"], row["id"]): row for row in rows}
    return [unique[key] for key in sorted(unique)]
