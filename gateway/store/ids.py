"""Identifiers that sort by the time they were made."""

import os
import time


def new_id(prefix: str) -> str:
    """A fresh identifier: `prefix`, 48 bits of Unix milliseconds and 80 random bits, in hex.

    The layout is that of UUID version 7 (RFC 9562) without its version bits, so rows that are
    made together lie together in an index.
    """
    milliseconds = time.time_ns() // 1_000_000
    return f"{prefix}{milliseconds:012x}{os.urandom(10).hex()}"
