"""A histogram that costs a fraction of a microsecond to add to."""

from bisect import bisect_left

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
"""Upper bounds of the buckets, in seconds: from a commit to the longest generation."""


class Histogram:
    """Counts by bucket, and the sum. One thread adds; any may read, and may miss the newest."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many were at or below it, as Prometheus takes them."""
        found = []
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), list(self.counts), strict=True):
            total += count
            found.append((bound, float(total)))
        return found
