"""Group commit: everything that is written at about the same time shares one transaction."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from gateway.store import outbox, rewards
from gateway.store.database import Database
from gateway.store.histogram import Histogram
from gateway.store.journal import Journal, Mover, connection_lost, packed
from gateway.store.records import CapturedCompletion, StoredReward, Tail
from gateway.store.rewards import NewReward, RewardList, RewardRefused
from gateway.store.rows import EncodedCompletion, encode
from gateway.store.statements import Statements

T = TypeVar("T")
Operation = Callable[[Connection], Any]
_Work = EncodedCompletion | RewardList | Operation
_Item = tuple[_Work, "asyncio.Future[Any]"]

log = logging.getLogger("strop.writer")

_DAY = 86_400.0
_DEADLOCK_TRIES = 5

_COMMIT_EVERY = 0.002
"""Seconds between the beginnings of two commits while several requests are being answered. A
commit costs a transaction, a sync of the disk and some handing of the interpreter's lock from
thread to thread, whatever is in it; PostgreSQL's `commit_delay` is the same idea."""

_SIBLINGS = 5
"""Requests that must be in progress beside those that wait, for a commit to be put off."""

_FRESH_SECONDS = 1.0
"""After which the writer's connection is asked whether it is still there, before it is used."""


class QueueFull(Exception):
    """More writes wait for a commit than the settings allow."""


class Writer:
    """Commits completions and other writes in the order of their arrival.

    A thread of its own takes whatever has gathered while the last commit ran, writes it with a
    few multi-row statements and commits once. A caller goes on when its own write is durable. A
    write that fails alone fails only its caller: the batch is then repeated one by one.

    With a journal, completions and rewards are committed there while the database is away, and
    until what is in it has been moved.
    """

    def __init__(
        self,
        database: Database,
        batch: int = 512,
        limit: int = 10_000,
        journal: Journal | None = None,
        journal_pending_days: float = 7.0,
        traced: Collection[str] = (),
    ):
        self._database = database
        self._batch = batch
        self._limit = limit
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._pending = 0
        self._traced = frozenset(traced)
        """Projects whose completions and rewards go to Langfuse too."""
        self._statements = Statements(database.is_sqlite)
        self._connection: Connection | None = None
        self._used_at = 0.0
        self._began = 0.0
        self.in_progress: Callable[[], int] = lambda: 0
        """Requests that are being answered, which will have something to write."""
        self.journal = journal
        self._mover = None
        if journal is not None:
            # Twice as many leave the journal in a turn as can enter it, so that it gets empty
            # however much is coming in.
            self._mover = Mover(
                journal, self._transaction, self._ping, 2 * batch, journal_pending_days * _DAY
            )
        self._thread = threading.Thread(target=self._run, name="strop-writer", daemon=True)
        self.commits = 0
        self.writes = 0
        self.commit_seconds = Histogram()
        """Of one transaction, from its beginning to its commit."""

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

    @property
    def pending(self) -> int:
        """Writes that wait for a commit."""
        return self._pending

    async def store(self, captured: CapturedCompletion) -> dict[bytes, Tail]:
        """Store a completion; returns, once it is durable, its tails by thread key.

        Raises:
            QueueFull: nothing was stored; the client should come back later.
        """
        encoded = encode(captured)
        await self._submit(encoded)
        return encoded.tails

    async def post_rewards(
        self, project: str, posted: Sequence[NewReward]
    ) -> tuple[list[StoredReward], bool] | None:
        """Store rewards as `rewards.post` does; None: they are in the journal, not checked yet.

        Raises:
            RewardRefused, QueueFull: nothing was stored.
        """
        result = await self._submit(RewardList(project, posted))
        return cast(tuple[list[StoredReward], bool] | None, result)

    async def run(self, operation: Callable[[Connection], T]) -> T:
        """Run `operation` inside the shared transaction; returns its result once durable.

        It must be safe to repeat: when another write of the batch fails it is run once more.
        """
        return cast(T, await self._submit(operation))

    async def _submit(self, work: _Work) -> Any:
        if self.full:
            raise QueueFull(f"{self._pending} writes are waiting for a commit")
        self._pending += 1
        future = asyncio.get_running_loop().create_future()
        self._queue.put((work, future))
        # A client that hangs up does not take its row with it: only its future is cancelled.
        return await future

    def _resolve(self, items: Sequence[_Item], results: Sequence[Any]) -> None:
        """Tell those who wait; an exception among the results is raised where it is awaited."""
        outcomes = [(future, result) for (_, future), result in zip(items, results, strict=True)]
        while outcomes:
            # One call into the loop for all that wait on it.
            loop = outcomes[0][0].get_loop()
            mine = [outcome for outcome in outcomes if outcome[0].get_loop() is loop]
            outcomes = [outcome for outcome in outcomes if outcome[0].get_loop() is not loop]
            try:
                loop.call_soon_threadsafe(self._tell, mine)
            except RuntimeError:
                log.warning("%d writes were committed after their loop had ended", len(mine))

    def _tell(self, outcomes: Sequence[tuple["asyncio.Future[Any]", Any]]) -> None:
        self._pending -= len(outcomes)
        for future, result in outcomes:
            if future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _run(self) -> None:
        while True:
            items, ended = self._gather()
            if items:
                self._commit(items)
            if self._mover is not None:
                self._mover.turn()
            if ended:
                break
        if self._mover is not None:
            self._mover.finish()
            self._mover.journal.close()
        self._disconnect()

    def _gather(self) -> tuple[list[_Item], bool]:
        try:
            first = self._queue.get(timeout=self._mover.wait() if self._mover else None)
        except Empty:
            return [], False
        if first is None:
            return [], True
        items = [first]
        self._wait_for_others()
        while len(items) < self._batch and not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return items, True
            items.append(item)
        return items, False

    def _wait_for_others(self) -> None:
        now = time.monotonic()
        left = self._began + _COMMIT_EVERY - now
        if left > 0 and self.in_progress() - self._pending >= _SIBLINGS:
            time.sleep(left)
            now += left
        self._began = now

    def _commit(self, items: list[_Item]) -> None:
        if self._mover is not None and self._mover.takes_over:
            self._commit_to_journal(self._mover, items)
            return
        try:
            results = self._repeated([work for work, _ in items])
        except Exception as error:
            if self._mover is not None and connection_lost(error):
                self._mover.lost(error)
                self._commit_to_journal(self._mover, items)
            elif len(items) == 1:
                self._resolve(items, [error])
            else:
                for item in items:
                    self._commit([item])
            return
        self._resolve(items, results)

    def _commit_to_journal(self, mover: Mover, items: list[_Item]) -> None:
        kept: list[_Item] = []
        entries = []
        for item in items:
            work = item[0]
            away = mover.away
            try:
                if isinstance(work, (EncodedCompletion, RewardList)):
                    entries.append(packed(work))
                    kept.append(item)
                else:
                    # If it is not away, the database is back and the journal not yet empty.
                    self._resolve([item], [away or self._transaction([work])[0]])
            except Exception as error:
                self._resolve([item], [error])
        if not kept:
            return
        try:
            mover.journal.append(entries)
        except Exception as error:
            self._resolve(kept, [error] * len(kept))
            return
        self._resolve(kept, [None] * len(kept))

    def _repeated(self, works: Sequence[_Work]) -> list[Any]:
        for _ in range(_DEADLOCK_TRIES - 1):
            try:
                return self._transaction(works)
            except DBAPIError as error:
                if not _deadlocked(error):
                    raise
        return self._transaction(works)

    def _transaction(self, works: Sequence[_Work]) -> list[Any]:
        began = time.monotonic()
        with self._write() as connection:
            encoded = [work for work in works if isinstance(work, EncodedCompletion)]
            if encoded:
                self._statements.insert(connection, encoded)
            # The others come last: they may refer to the completions of this very batch. A list
            # of rewards that is refused leaves nothing behind, so nobody has to try again.
            lists = [work for work in works if isinstance(work, RewardList)]
            posted = iter(rewards.post_lists(connection, lists) if lists else ())
            results = [
                next(posted) if isinstance(work, RewardList) else _perform(connection, work)
                for work in works
            ]
            if self._traced:
                self._note_for_langfuse(connection, encoded, works, results)
        self.commit_seconds.add(time.monotonic() - began)
        self.commits += 1
        self.writes += len(works)
        return results

    def _note_for_langfuse(
        self,
        connection: Connection,
        encoded: Sequence[EncodedCompletion],
        works: Sequence[_Work],
        results: Sequence[Any],
    ) -> None:
        now = time.time()
        completions = [(e.completion["project"], e.completion["id"]) for e in encoded]
        posted = [
            (work.project, stored.id)
            for work, result in zip(works, results, strict=True)
            if isinstance(work, RewardList) and not isinstance(result, RewardRefused)
            for stored in result[0]
        ]
        for kind, things in ((outbox.COMPLETION, completions), (outbox.REWARD, posted)):
            outbox.add(connection, kind, [t for t in things if t[0] in self._traced], now)

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        """A transaction on the connection that the thread keeps."""
        connection = self._connection
        if connection is not None and time.monotonic() - self._used_at > _FRESH_SECONDS:
            connection = self._if_there(connection)
        if connection is None:
            connection = self._connection = self._database.connect_to_write()
        try:
            with connection.begin():
                yield connection
        except BaseException:
            if connection.invalidated or connection.closed:
                self._disconnect()
            raise
        self._used_at = time.monotonic()

    def _if_there(self, connection: Connection) -> Connection | None:
        if self._database.is_sqlite:
            return connection
        try:
            with connection.begin():
                connection.execute(text("SELECT 1"))
        except DBAPIError:
            self._disconnect()
            return None
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ping(self) -> None:
        with self._database.read() as connection:
            connection.execute(text("SELECT 1"))


def _perform(connection: Connection, work: EncodedCompletion | Operation) -> Any:
    return None if isinstance(work, EncodedCompletion) else work(connection)


def _deadlocked(error: Exception) -> bool:
    """Whether PostgreSQL gave up on a transaction that would succeed if it were repeated."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    return state in ("40P01", "40001")
