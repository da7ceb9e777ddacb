"""Commits on a thread while requests come one by one, and in a process while they come together.

A thread answers a lone request sooner, as nothing has to be carried to and fro. When several are in
progress it takes the interpreter from them, and the process is worth its price. It is started when
there is such a load for the first time: a gateway that never has it stays one process.
"""

import time

from gateway.writing.shared import SharedWriter

_SEVERAL = 2
"""Requests in progress for which the process commits."""

_BUSY_SECONDS = 0.1
"""For which it goes on to after the last time that so many were in progress: if a load that goes
up and down changed between the two, each would wait for the other's transactions."""


class WriterByLoad(SharedWriter):
    """A `SharedWriter` that begins as a thread; for a gateway that is alone, on SQLite."""

    _busy_until = 0.0

    def start(self) -> None:
        """Begin to commit on the thread."""
        self.start_thread()

    @property
    def counts_all(self) -> bool:
        """Always, as nobody else has the process."""
        return True

    def _takes_thread(self) -> bool:
        now = time.monotonic()
        if self.in_progress() >= _SEVERAL:
            self._busy_until = now + _BUSY_SECONDS
            if self._connecting is None and self._emptied is None:
                self.start_process()
        # Until the process is there, and when it has died, the thread is.
        return not self._heard or now >= self._busy_until
