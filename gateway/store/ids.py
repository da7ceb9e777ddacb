"""Identifiers that sort by the time they were made."""

import os
import time

_latest = 0


def new_id(prefix: str) -> str:
    """A fresh identifier: `prefix`, 68 bits of time and 60 random bits, in hex.

    The layout is that of UUID version 7 with more of the clock in place of its first random
    bits (RFC 9562, section 6.2, method 3), without its version bits: 48 bits of Unix
    milliseconds, then 20 bits of nanoseconds within the millisecond. Rows that are made together
    lie together in an index, and pages of them are in the order in which they were made: in one
    thread each identifier is greater than the one before it, though the clock stand still or be
    set back.
    """
    global _latest
    # Two threads may come to the same nanosecond here; the random bits keep them apart.
    _latest = now = max(time.time_ns(), _latest + 1)
    milliseconds, nanoseconds = divmod(now, 1_000_000)
    return f"{prefix}{milliseconds:012x}{nanoseconds:05x}{os.urandom(8).hex()[:15]}"
