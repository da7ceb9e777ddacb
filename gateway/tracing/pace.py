"""How fast to send: what the gateway leaves of a core, as long as no trace gets too old by it.

A low priority alone is not enough. On few cores whoever encodes traces still takes caches and
memory from those who answer requests, and each of its turns delays one of theirs. Sending has time:
while the gateway is busy it gets a small share of a core, and catches up when there is less to do.
"""

import threading
import time
from collections.abc import Callable

LEAST_SHARE = 0.05
"""Of a core, however busy the gateway is: sending is slow then, and never stands still."""

_MOST_DEBT = 0.5
"""CPU seconds: no single batch is waited for longer than this over `LEAST_SHARE`, 10 s."""

_SLICE = 0.5
"""Seconds after which a wait looks whether the gateway is still busy."""


class Meter:
    """The share of a core that this process used since it was last asked; may be over 1."""

    def __init__(self) -> None:
        self._at, self._used = time.monotonic(), time.process_time()

    def share(self) -> float:
        """CPU seconds per second."""
        at, used = time.monotonic(), time.process_time()
        found = (used - self._used) / max(at - self._at, 1e-3)
        self._at, self._used = at, used
        return found


class Pace:
    """Spends CPU time no faster than it is allowed; one for all threads of a process.

    What was used is a debt, which is paid off at the share of a core that may be used.
    """

    def __init__(
        self,
        lag_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.time,
    ):
        """
        Args:
            lag_seconds: age of what is to be sent from which on nothing is waited for.
            clock, used, now: monotonic seconds, CPU seconds of this process, Unix seconds.
        """
        self._lag_seconds = lag_seconds
        self._clock, self._used, self._now = clock, used, now
        self._lock = threading.Lock()
        self._share = 1.0
        self._debt = 0.0
        self._last = clock(), used()

    def told(self, busy: float) -> None:
        """The gateway uses this share of a core."""
        with self._lock:
            self._settle()
            self._share = min(1.0, max(LEAST_SHARE, 1.0 - busy))

    def left(self, oldest: float | None) -> float:
        """Seconds until more may be sent, if the gateway stays as it is; 0: now.

        Args:
            oldest: Unix seconds since which the oldest waits that is to be sent.
        """
        with self._lock:
            self._settle()
            late = oldest is not None and self._now() - oldest >= self._lag_seconds
            return 0.0 if late else self._debt / self._share

    def wait(self, stop: threading.Event, oldest: float | None) -> None:
        """Wait until more may be sent, or `stop` is set."""
        while (left := self.left(oldest)) > 0 and not stop.is_set():
            stop.wait(min(left, _SLICE))

    def _settle(self) -> None:
        at, used = self._clock(), self._used()
        debt = self._debt + used - self._last[1] - self._share * (at - self._last[0])
        self._debt = min(max(debt, 0.0), _MOST_DEBT)
        self._last = at, used
