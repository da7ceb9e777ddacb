"""The ids under which Langfuse knows what strop has logged.

All of them follow from strop's own, so that a score finds its generation, and what is sent twice
is there once. OpenTelemetry wants 16 bytes for a trace and 8 for a span, not all zero.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*")

SCORE_PREFIX = "strop-"
"""What the ids of strop's own scores begin with."""


@dataclass(slots=True, frozen=True)
class Place:
    """Where in Langfuse something hangs."""

    trace_id: str
    parent_id: str | None
    """The observation that it is in; None at the top of its trace."""


MOST_PARTS = 1_000
"""Traces that one trajectory can have; what would come after them is in the last."""


@lru_cache(4096)
def trace_id(project: str, trajectory_id: str, part: int = 0) -> str:
    """The trace of a trajectory that no caller traces: 32 hex digits.

    Args:
        part: of a trajectory that is too long for one trace, which of its traces.
    """
    return _digest(16, "trace", project, trajectory_id, *_further(part))


@lru_cache(4096)
def agent_id(project: str, trajectory_id: str, part: int = 0) -> str:
    """The observation that stands for a trajectory in a part of it: 16 hex digits."""
    return _digest(8, "trajectory", project, trajectory_id, *_further(part))


def generation_id(completion_id: str) -> str:
    """The observation of a completion: 16 hex digits."""
    return _digest(8, "completion", completion_id)


def score_id(
    project: str, trajectory_id: str, completion_id: str | None, choice: int | None, name: str
) -> str:
    """The score of all rewards of one name against one thing: a correction replaces it."""
    target = completion_id if completion_id is not None else f"trajectory {trajectory_id}"
    return SCORE_PREFIX + _digest(16, "score", project, target, str(choice), name)


def callers_place(traceparent: str | None) -> Place | None:
    """The caller's trace and span, from the `traceparent` header of a request."""
    match = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
    if match is None or not match[1].strip("0"):
        return None
    return Place(match[1], match[2] if match[2].strip("0") else None)


def _further(part: int) -> tuple[str, ...]:
    return (str(part),) if part else ()


def _digest(size: int, *parts: str) -> str:
    # Lengths keep ("a", "bc") and ("ab", "c") apart.
    data = "".join(f"{len(part)}:{part}" for part in parts).encode()
    found = blake2b(data, digest_size=size).hexdigest()
    return found if found.strip("0") else "1" * (2 * size)
