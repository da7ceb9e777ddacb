"""Several processes on one port: who is which, and which of them publishes or sends to Langfuse.

Each is a whole gateway. What they share is the database, on SQLite the process that commits
(`gateway.writing`), and for who does what, locks on files in the data folder: the kernel takes a
lock away from a process that ends, in whatever way, so another can go on at once and no two ever
hold it. The folder must be on a disk of this machine; gateways on several machines have one
publisher each, which do each other no harm.
"""

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from gateway.store.journal import Journal

log = logging.getLogger("strop.workers")

_MOST = 1024


class Worker:
    """This process's place among the others."""

    def __init__(self, folder: Path, workers: int):
        """Take the first place that is free.

        Args:
            folder: the data folder, the same for all.
            workers: how many there are; with one nothing is shared, and nothing locked.
        """
        self.folder = folder
        self.alone = workers == 1
        self._chosen: set[str] = set()
        self._locks: list[int] = []
        self.place = 0
        if not self.alone:
            folder.mkdir(parents=True, exist_ok=True)
            self.place = self._first_free()

    @property
    def journal(self) -> Path:
        """The journal that no other process uses."""
        return _journal(self.folder, self.place)

    def publishes(self) -> bool:
        """Whether this process publishes and retires versions; once it does, until it ends."""
        return self._is_the_one("publisher", "publishes")

    def sends(self) -> bool:
        """Whether this process has the sender to Langfuse; once it does, until it ends."""
        return self._is_the_one("langfuse", "sends to Langfuse")

    def commits(self) -> bool:
        """Whether this process has the one that commits for all; once it does, until it ends."""
        return self._is_the_one("writer", "has the process that commits")

    def _is_the_one(self, role: str, does: str) -> bool:
        if self.alone or role in self._chosen:
            return True
        lock = _try_lock(self.folder / f"{role}.lock")
        if lock is None:
            return False
        self._chosen.add(role)
        self._locks.append(lock)
        log.info("worker %d (process %d) %s", self.place, os.getpid(), does)
        return True

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """What must not happen in two processes at once, such as a migration. Blocks."""
        if self.alone:
            yield
            return
        lock = os.open(self.folder / "start.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    @asynccontextmanager
    async def in_turn_async(self) -> AsyncIterator[None]:
        """The same on an event loop."""
        turn = self.in_turn()
        await asyncio.to_thread(turn.__enter__)
        try:
            yield
        finally:
            turn.__exit__(None, None, None)

    def adopt(self, journal: Journal) -> None:
        """Take over what journals hold whose processes are gone: there were more workers once."""
        for path in self.folder.glob("journal-*.db"):
            place = path.stem.removeprefix("journal-")
            if not place.isdecimal() or int(place) == self.place:
                continue
            lock = _try_lock(_place_lock(self.folder, int(place)))
            if lock is None:
                continue
            try:
                found = take_over(path, journal)
                if found:
                    log.warning(
                        "%d entries of %s, a journal without process, are ours", found, path
                    )
            finally:
                os.close(lock)

    def close(self) -> None:
        """Leave the place to another."""
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()
        self._chosen.clear()

    def _first_free(self) -> int:
        for place in range(_MOST):
            lock = _try_lock(_place_lock(self.folder, place))
            if lock is not None:
                self._locks.append(lock)
                return place
        raise RuntimeError(f"{_MOST} workers use {self.folder} already")


def _journal(folder: Path, place: int) -> Path:
    return folder / ("journal.db" if place == 0 else f"journal-{place}.db")


def take_over(path: Path, journal: Journal) -> int:
    """Move the entries of a journal that no process uses into another; returns how many."""
    with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as other:
        # Twice, if the process ends in between: entries carry their ids, and are stored once.
        entries = other.execute("SELECT kind, payload FROM entries ORDER BY seq").fetchall()
        if entries:
            journal.append(entries)
            other.execute("DELETE FROM entries")
    return len(entries)


def _place_lock(folder: Path, place: int) -> Path:
    return folder / f"worker-{place}.lock"


def _try_lock(path: Path) -> int | None:
    """The descriptor that holds the lock while it is open; None if another process holds it."""
    found = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(found)
        return None
    return found
