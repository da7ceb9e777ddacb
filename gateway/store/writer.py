"""Group commit: everything that is written at about the same time shares one transaction."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast

from sqlalchemy import Connection

from gateway.store.committer import Committer, Work
from gateway.store.database import Database
from gateway.store.histogram import Histogram
from gateway.store.journal import Journal
from gateway.store.records import CapturedCompletion, StoredReward, Tail
from gateway.store.rewards import NewReward, RewardList
from gateway.store.rows import encode

T = TypeVar("T")
_Item = tuple[Work, "asyncio.Future[Any]"]

log = logging.getLogger("strop.writer")

_COMMIT_EVERY = 0.002
"""Seconds between the beginnings of two commits while several requests are being answered. A
commit costs a transaction, a sync of the disk and some handing of the interpreter's lock from
thread to thread, whatever is in it; PostgreSQL's `commit_delay` is the same idea."""

_SIBLINGS = 5
"""Requests that must be in progress beside those that wait, for a commit to be put off."""


class HasState(Protocol):
    """A journal, here or in another process."""

    def state(self) -> dict[str, Any]:
        """How much there is, for people."""


class QueueFull(Exception):
    """More writes wait for a commit than the settings allow."""


class Pause:
    """Puts commits off for a moment while requests are on their way that will have some too."""

    def __init__(self) -> None:
        self._began = 0.0

    def wait(self, in_progress: Callable[[], int]) -> bool:
        """Wait before a commit, if it is worth it; whether it was.

        Args:
            in_progress: requests that are being answered and wait for no commit yet.
        """
        now = time.monotonic()
        left = self._began + _COMMIT_EVERY - now
        worth = left > 0 and in_progress() >= _SIBLINGS
        if worth:
            time.sleep(left)
            now += left
        self._began = now
        return worth


def settle(future: "asyncio.Future[Any]", result: Any) -> None:
    """Give a future its result, or raise it there if it is an exception; unless nobody waits."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


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
        self._pause = Pause()
        self.in_progress: Callable[[], int] = lambda: 0
        """Requests that are being answered, which will have something to write."""
        self.committer = Committer(database, batch, journal, journal_pending_days, traced)
        self.journal: HasState | None = journal
        self._thread = threading.Thread(target=self._run, name="strop-writer", daemon=True)

    @property
    def counts_all(self) -> bool:
        """Whether the journal is counted here, and not by another process that shares it."""
        return True

    @property
    def commits(self) -> int:
        """Transactions so far."""
        return self.committer.commits

    @property
    def writes(self) -> int:
        """Writes that shared those."""
        return self.committer.writes

    @property
    def commit_seconds(self) -> Histogram:
        """Of one transaction, from its beginning to its commit."""
        return self.committer.commit_seconds

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

    def check_room(self) -> None:
        """
        Raises:
            QueueFull: a further write is refused.
        """
        if self.full:
            raise QueueFull(f"{self._pending} writes are waiting for a commit")

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

    async def _submit(self, work: Work) -> Any:
        self.check_room()
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
            settle(future, result)

    def _run(self) -> None:
        while True:
            items, ended = self._gather()
            if items:
                self._commit(items)
            self.committer.turn()
            if ended:
                break
        self.committer.close()

    def _gather(self) -> tuple[list[_Item], bool]:
        try:
            first = self._queue.get(timeout=self.committer.wait())
        except Empty:
            return [], False
        if first is None:
            return [], True
        items = [first]
        self._pause.wait(lambda: self.in_progress() - self._pending)
        while len(items) < self._batch and not self._queue.empty():
            item = self._queue.get()
            if item is None:
                return items, True
            items.append(item)
        return items, False

    def _commit(self, items: list[_Item]) -> None:
        self._resolve(items, self.committer.commit([work for work, _ in items]))
