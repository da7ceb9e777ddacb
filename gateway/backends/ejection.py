"""When a replica that fails is left alone, and when it is tried again."""

from time import monotonic

_FAILURES = 3
"""In a row, until it is ejected."""

_FIRST_SECONDS, _MOST_SECONDS = 5.0, 60.0
"""For which it is left alone; twice as long each time, up to the second."""


class Ejection:
    """Of one replica."""

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.error: str | None = None
        self._seconds = _FIRST_SECONDS
        self._until = float("-inf")

    @property
    def now(self) -> bool:
        """Whether it gets no requests, as long as others can take them."""
        return monotonic() < self._until

    def failed(self, error: str) -> None:
        """A request failed by the replica's fault; after a return the first one ejects it again."""
        self.failures += 1
        self.error = error
        if self.failures >= _FAILURES and not self.now:
            self._until = monotonic() + self._seconds
            self._seconds = min(2 * self._seconds, _MOST_SECONDS)

    def succeeded(self) -> None:
        """A request was answered: it is as good as new."""
        if self.failures:
            self.failures, self.error, self._seconds = 0, None, _FIRST_SECONDS
            self._until = float("-inf")
