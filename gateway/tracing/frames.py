"""What surrounds the content of a generation: names, parameters, metadata; and how large it is.

Content is cut to fit; what surrounds it is not. So it is what says how many generations fit into
one trace.
"""

from typing import Any
from urllib.parse import quote

from sqlalchemy import RowMapping

from gateway.store.records import Json, StoredCompletion
from gateway.tracing.content import dump, size

STUB = 400
"""Bytes of content that an observation has where its trace is full."""

SMALL = 1_000
"""Most bytes of a client's metadata, and of an error."""

_ALWAYS = 1_500
"""Bytes of every observation: ids, times, keys of attributes."""

_LONGEST_LABEL = 200
"""Characters of a tag, a session or a name: Langfuse drops longer ones."""

_LONGEST_PARAMETER = 500
_MOST_PARAMETERS = 32
"""Characters of a parameter, and parameters: a grammar, or a bias for each token, may be long."""

_PARAMETERS = (
    "max_tokens",
    "max_completion_tokens",
    "n",
    "stop",
    "reasoning_effort",
    "tool_choice",
)


def frame(completion: StoredCompletion, row: RowMapping | None) -> int:
    """Bytes of a generation beside its content, at most.

    Args:
        row: its trajectory.
    """
    group = len(str(row["group_id"]).encode()) if row is not None else 0
    trajectory = len(completion.trajectory_id.encode())
    # A page's link is in the metadata, and where each of two texts was cut.
    links = 3 * (len(quote(completion.trajectory_id, safe="")) + 60)
    metadata = min(size(completion.client_metadata), SMALL) if completion.client_metadata else 0
    error = SMALL if completion.status != "complete" else 0
    return (
        _ALWAYS + 3 * group + trajectory + links + metadata + error + size(parameters(completion))
    )


def parameters(completion: StoredCompletion) -> Json:
    """What was asked for beside the messages, each value and their number bounded."""
    asked = {name: completion.request.get(name) for name in _PARAMETERS}
    shaped = {name: value for name, value in completion.sampling.items() if name != "asked"}
    return {
        label(name): value if isinstance(value, int | float) else _short(value)
        for name, value in list({**asked, **shaped}.items())[:_MOST_PARAMETERS]
        if value is not None
    }


def label(text: str) -> str:
    """A name as Langfuse takes it."""
    # Langfuse takes sessions of ASCII only.
    text = text.encode("ascii", "replace").decode() if not text.isascii() else text
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "~"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else dump(value).decode()
    return text if len(text) <= _LONGEST_PARAMETER else text[: _LONGEST_PARAMETER - 1] + "…"
