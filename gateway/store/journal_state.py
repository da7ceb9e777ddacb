"""How much is in a journal, wherever it is."""

import time
from typing import Any, NamedTuple


class JournalState(NamedTuple):
    """Counts of entries; those that wait for their completion are pending."""

    entries: int = 0
    oldest_at: float | None = None
    """Unix seconds; None where there is nothing."""
    pending: int = 0
    rejected: int = 0

    def shown(self) -> dict[str, Any]:
        """The same for people."""
        oldest = self.oldest_at
        return {
            "entries": self.entries,
            "oldest_seconds": round(time.time() - oldest, 1) if oldest is not None else None,
            "pending": self.pending,
            "rejected": self.rejected,
        }
