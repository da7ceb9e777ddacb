"""Cutting what is too large for Langfuse: an event over 1 MB is lost, a trace over 4 MB unreadable.

What is cut keeps its shape, so that a conversation is still shown as one: first its long texts are
shortened in their middle, then messages in its middle are left out. Each cut says how much is
missing and where all of it is.
"""

from typing import Any

import orjson

EVENT_BYTES = 800_000
"""Most content, in bytes of JSON, of one observation."""

TRACE_BYTES = 2_000_000
"""Most content of all observations of a trace together, beside the stubs of a full one."""

FRAMES_BYTES = 1_500_000
"""Most of what surrounds content, stubs among it, in one of strop's traces. What comes after it
goes into a further one."""

_SHORTEST = 160
"""Characters that are left of every text before messages are left out."""


def size(value: Any) -> int:
    """Bytes of a value as JSON."""
    return len(dump(value))


def dump(value: Any) -> bytes:
    """A value as JSON, whatever is in it."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)


def cut(value: Any, limit: int, link: str) -> Any:
    """A value of at most `limit` bytes as JSON, or a few dozen where the limit is less than that.

    Args:
        link: where people find all of it.
    """
    whole = size(value)
    if whole <= limit:
        return value
    longest = limit
    while longest > _SHORTEST:
        longest = max(_SHORTEST, longest // 2)
        shortened = _shorten(value, longest, link)
        if size(shortened) <= limit:
            return shortened
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return {"messages": cut(value["messages"], limit - 20, link)}
    if isinstance(value, list):
        return _middle_out(_shorten(value, _SHORTEST, link), limit, link)
    return f"({whole:,} bytes: {link})"


def _shorten(value: Any, longest: int, link: str) -> Any:
    if isinstance(value, str):
        return _shorten_text(value, longest, link)
    if isinstance(value, list):
        return [_shorten(item, longest, link) for item in value]
    if isinstance(value, dict):
        return {key: _shorten(item, longest, link) for key, item in value.items()}
    return value


def _shorten_text(text: str, longest: int, link: str) -> str:
    if len(text) <= longest:
        return text
    if text.startswith("data:") and "," in text[:200]:
        # The half of an image is worth nothing.
        return f"({text[5:].split(',', 1)[0]}, {len(text):,} characters: {link})"
    kept = max(20, longest - len(link) - 40)
    head = kept * 2 // 3
    tail = kept - head
    if len(text) - head - tail < len(link) + 40:
        return text
    missing = len(text) - head - tail
    return f"{text[:head]}\n… {missing:,} characters cut: {link} …\n{text[-tail:]}"


def _middle_out(items: list[Any], limit: int, link: str) -> Any:
    """The beginning of a list and as much of its end as fits."""

    def with_last(count: int) -> list[Any]:
        missing = len(items) - 1 - count
        note = {"role": "system", "content": f"({missing:,} messages left out: {link})"}
        return [items[0], note, *items[len(items) - count :]]

    low, high = 0, max(0, len(items) - 2)
    while low < high:
        middle = (low + high + 1) // 2
        if size(with_last(middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    found = with_last(low)
    return found if size(found) <= limit else f"({len(items):,} messages: {link})"
