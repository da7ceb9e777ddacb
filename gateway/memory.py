"""The collector's part in a process that serves for long."""

import gc


def settle_memory() -> None:
    """Keep the collector from walking over the modules again and again: a request leaves few
    cycles behind, and what was imported stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
