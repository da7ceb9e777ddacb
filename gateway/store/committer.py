"""What a writer does with a batch: one transaction for all of it, or the journal."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from gateway.store import outbox, rewards
from gateway.store.database import Database
from gateway.store.histogram import Histogram
from gateway.store.journal import Journal, Mover, connection_lost, packed
from gateway.store.rewards import RewardList, RewardRefused
from gateway.store.rows import EncodedCompletion
from gateway.store.statements import Statements

Operation = Callable[[Connection], Any]
Work = EncodedCompletion | RewardList | Operation

log = logging.getLogger("strop.writer")

_DAY = 86_400.0
_DEADLOCK_TRIES = 5

_FRESH_SECONDS = 1.0
"""After which the connection is asked whether it is still there, before it is used."""


class Committer:
    """Commits batches on a connection that it keeps; one thread uses it.

    With a journal, completions and rewards are committed there while the database is away, and
    until what is in it has been moved.
    """

    def __init__(
        self,
        database: Database,
        batch: int,
        journal: Journal | None = None,
        journal_pending_days: float = 7.0,
        traced: Collection[str] = (),
    ):
        """
        Args:
            batch: most works that are committed together.
            traced: projects whose completions and rewards go to Langfuse too.
        """
        self._database = database
        self._traced = frozenset(traced)
        self._statements = Statements(database.is_sqlite)
        self._connection: Connection | None = None
        self._used_at = 0.0
        self.mover = None
        if journal is not None:
            # Twice as many leave the journal in a turn as can enter it, so that it gets empty
            # however much is coming in.
            self.mover = Mover(
                journal, self.transaction, self._ping, 2 * batch, journal_pending_days * _DAY
            )
        self.commits = 0
        self.writes = 0
        self.commit_seconds = Histogram()
        """Of one transaction, from its beginning to its commit."""

    def commit(self, works: Sequence[Work]) -> list[Any]:
        """Make works durable; returns their results in the same order.

        Of a work that failed the result is its exception: the batch is then repeated one by one,
        so that it fails alone. None for what is in the journal, and for completions.
        """
        if self.mover is not None and self.mover.takes_over:
            return self._to_journal(self.mover, works)
        try:
            return self._repeated(works)
        except Exception as error:
            if self.mover is not None and connection_lost(error):
                self.mover.lost(error)
                return self._to_journal(self.mover, works)
            if len(works) == 1:
                return [error]
        return [result for work in works for result in self.commit([work])]

    def wait(self) -> float | None:
        """Seconds until `turn` has something to do; None if only a new work gives it something."""
        return self.mover.wait() if self.mover is not None else None

    def turn(self) -> None:
        """Move some of the journal, if it is time to."""
        if self.mover is not None:
            self.mover.turn()

    def close(self, finish: bool = True) -> None:
        """Leave the database; with `finish`, move what it takes of the journal before."""
        if self.mover is not None:
            if finish:
                self.mover.finish()
            self.mover.journal.close()
        self._disconnect()

    def _to_journal(self, mover: Mover, works: Sequence[Work]) -> list[Any]:
        results: list[Any] = [None] * len(works)
        kept, entries = [], []
        for place, work in enumerate(works):
            away = mover.away
            try:
                if isinstance(work, (EncodedCompletion, RewardList)):
                    entries.append(packed(work))
                    kept.append(place)
                else:
                    # If it is not away, the database is back and the journal not yet empty.
                    results[place] = away or self.transaction([work])[0]
            except Exception as error:
                results[place] = error
        if not kept:
            return results
        try:
            mover.journal.append(entries)
        except Exception as error:
            for place in kept:
                results[place] = error
        return results

    def _repeated(self, works: Sequence[Work]) -> list[Any]:
        for _ in range(_DEADLOCK_TRIES - 1):
            try:
                return self.transaction(works)
            except DBAPIError as error:
                if not _deadlocked(error):
                    raise
        return self.transaction(works)

    def transaction(self, works: Sequence[Work]) -> list[Any]:
        """Commit works together, or nothing of them."""
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
        works: Sequence[Work],
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
        """A transaction on the connection that is kept."""
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
