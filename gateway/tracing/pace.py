"""How fast to send: with what the gateway, and whatever else is on the machine, leaves of a core.

A low priority alone is not enough. On few cores whoever encodes traces still takes caches and
memory from those who answer requests, and each of its turns delays one of theirs. Sending has time:
while no core is idle it gets a small share of one, somewhat more once traces are late, and catches
up when there is less to do.
"""

import os
import threading
import time
from collections.abc import Callable

LEAST_SHARE = 0.05
"""Of a core, however busy the machine is: sending is slow then, and never stands still."""

LATE_SHARE = 0.15
"""The same once something has waited for `lag_seconds`: a backlog that grows all the same is a
matter of memory on a disk, and requests are answered meanwhile."""

_UNTOUCHED = 0.5
"""Cores that stay idle where there are idle ones: who sends does not take the last."""

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


class Idle:
    """Cores of the machine that had nothing to do since it was last asked."""

    def __init__(self, path: str = "/proc/stat") -> None:
        self._path = path
        self._at, self._idle = time.monotonic(), self._read()

    def cores(self) -> float:
        """On average; 0 where the system does not say."""
        at, idle = time.monotonic(), self._read()
        found = (idle - self._idle) / max(at - self._at, 1e-3)
        self._at, self._idle = at, idle
        return max(0.0, found)

    def _read(self) -> float:
        """Seconds since the start of the machine, of all cores."""
        try:
            with open(self._path) as file:
                # cpu, user, nice, system, idle, ...
                return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return 0.0


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
            lag_seconds: age of what is to be sent from which on it gets `LATE_SHARE`; 0: nothing is
                ever waited for.
            clock, used, now: monotonic seconds, CPU seconds of this process, Unix seconds.
        """
        self._lag_seconds = lag_seconds
        self._clock, self._used, self._now = clock, used, now
        self._lock = threading.Lock()
        self._share = 1.0
        self._late = False
        self._debt = 0.0
        self._last = clock(), used()

    def told(self, busy: float, room: float = 0.0) -> None:
        """How the machine is.

        Args:
            busy: the share of a core that the gateway uses.
            room: cores that are idle or used by this process.
        """
        with self._lock:
            self._settle()
            self._share = min(1.0, max(LEAST_SHARE, 1.0 - busy, room - _UNTOUCHED))

    def left(self, oldest: float | None) -> float:
        """Seconds until more may be sent, if the machine stays as it is; 0: now.

        Args:
            oldest: Unix seconds since which the oldest waits that is to be sent.
        """
        with self._lock:
            self._settle()
            if not self._lag_seconds:
                return 0.0
            self._late = oldest is not None and self._now() - oldest >= self._lag_seconds
            return self._debt / self._allowed()

    def wait(self, stop: threading.Event, oldest: float | None) -> None:
        """Wait until more may be sent, or `stop` is set."""
        while (left := self.left(oldest)) > 0 and not stop.is_set():
            stop.wait(min(left, _SLICE))

    def _allowed(self) -> float:
        return max(self._share, LATE_SHARE) if self._late else self._share

    def _settle(self) -> None:
        at, used = self._clock(), self._used()
        debt = self._debt + used - self._last[1] - self._allowed() * (at - self._last[0])
        self._debt = min(max(debt, 0.0), _MOST_DEBT)
        self._last = at, used
