"""Kills process groups whose owner died without doing so itself.

Run as its own process by `gateway.supervisor`, which writes `+GROUP` and `-GROUP` lines to its
input. The pipe closes when the supervisor ends in whatever way, SIGKILL included: then every group
still on the list gets SIGTERM, and SIGKILL after `GRACE`. PR_SET_PDEATHSIG would reach only the
direct children, and vLLM computes in a grandchild.

Imports next to nothing, so that it starts in milliseconds and stays small.
"""

import os
import signal
import sys
import time

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""


def main() -> None:
    """Read the list until the pipe closes, then end what is left on it."""
    # Ctrl-C and a stop of the supervisor's whole group must not end the one who cleans up.
    os.setsid()
    for stop_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop_signal, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    groups = {group for group in groups if send(group, signal.SIGTERM)}
    until = time.monotonic() + GRACE
    while groups and time.monotonic() < until:
        time.sleep(0.1)
        groups = {group for group in groups if send(group, 0)}
    for group in groups:
        send(group, signal.SIGKILL)


def send(group: int, number: int) -> bool:
    """Signal a process group; False where nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
