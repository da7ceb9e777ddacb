"""How the sending process writes to the database without holding up those who answer requests.

SQLite has one writer at a time. A transaction of a process at low priority could be put aside in
its middle, with the lock; so transactions run in a thread of normal priority, and do not wait for
the disk: what is lost in a power cut is sent, or read, once more.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection, event

from gateway.store import Database

T = TypeVar("T")

_LOWEST = 19


class Writes:
    """Runs transactions one at a time, in a thread of its own."""

    def __init__(self, database: Database):
        self.database = database
        self._thread = ThreadPoolExecutor(1, "strop-langfuse-writes")
        # The thread has the priority of whoever starts it, and is started by the first call: that
        # must not be one whose priority was lowered.
        self._thread.submit(int).result()

    def run(self, operation: Callable[[Connection], T]) -> T:
        """Run `operation` in a transaction and commit it."""
        return self._thread.submit(self._run, operation).result()

    def _run(self, operation: Callable[[Connection], T]) -> T:
        with self.database.write() as connection:
            return operation(connection)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def relax(database: Database) -> None:
    """Let commits on SQLite not wait for the disk. Before the first connection."""
    if not database.is_sqlite:
        return

    @event.listens_for(database.engine, "connect")
    def configure(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA synchronous=NORMAL")


def lower_priority() -> None:
    """Let this thread run only when nobody else wants to, where the system can do that."""
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
