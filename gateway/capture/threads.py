"""Recognising that a request continues an earlier completion.

A completion leaves a key: the digest of its messages and its answer, normalised for what clients
change when they echo a conversation. A later request is matched by the keys of its own
beginnings, the longest first.
"""

from collections import OrderedDict
from hashlib import blake2b
from typing import Any

import orjson

from gateway.store.codec import DIGEST_BYTES
from gateway.store.records import Tail

_ALIKE = 256
"""Most threads that end alike of which the tails are remembered."""

_SEARCHED = 64
"""Most beginnings of one request that are looked for; an agent's last turns are enough."""


def beginnings(messages: list[Any]) -> tuple[list[bytes], Any]:
    """Keys of all beginnings that end with an answer, longest first, and the running digest.

    The digest stands after the whole of `messages`; `extend` goes on from it.
    """
    state = blake2b(digest_size=DIGEST_BYTES)
    keys: list[bytes] = []
    for message in messages:
        _update(state, message)
        if isinstance(message, dict) and message.get("role") == "assistant":
            keys.append(state.digest())
    return keys[::-1][:_SEARCHED], state


def extend(state: Any, answer: dict[str, Any]) -> bytes:
    """The key that an answer leaves, given the digest of the messages before it."""
    longer = state.copy()
    _update(longer, answer)
    key: bytes = longer.digest()
    return key


def _update(state: Any, message: Any) -> None:
    data = orjson.dumps(normalise(message), option=orjson.OPT_SORT_KEYS)
    state.update(len(data).to_bytes(4, "big"))
    state.update(data)


def normalise(message: Any) -> Any:
    """A message without what clients drop, add or rewrite when they send it back."""
    if not isinstance(message, dict):
        return message
    kept: dict[str, Any] = {"role": message.get("role")}
    content = _content(message.get("content"))
    if content:
        kept["content"] = content
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = [_tool_call(call) for call in calls]
    for key in ("tool_call_id", "name"):
        if message.get(key):
            kept[key] = message[key]
    return kept


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content.rstrip()
    if not isinstance(content, list):
        return content
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")
    ]
    if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
        return "".join(str(text) for text in texts).rstrip()
    return [
        {key: value for key, value in part.items() if key != "cache_control"}
        if isinstance(part, dict)
        else part
        for part in content
    ]


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            arguments = arguments.strip()
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


class ThreadIndex:
    """The tails of recent completions by project and key; the least recently used go first.

    Several threads may end alike (one prompt, asked twice, answered alike): a key holds all of
    their tails, and a request takes one that nothing has continued yet, the newest first.
    """

    def __init__(self, size: int = 50_000):
        self._size = size
        self._tails: OrderedDict[tuple[str, bytes], list[Tail]] = OrderedDict()

    def add(self, project: str, tails: dict[bytes, Tail]) -> None:
        """Remember what a completion left."""
        for key, tail in tails.items():
            place = (project, key)
            alike = self._tails.setdefault(place, [])
            alike.append(tail)
            if len(alike) > _ALIKE:
                del alike[0]
            self._tails.move_to_end(place)
        while len(self._tails) > self._size:
            self._tails.popitem(last=False)

    def take(
        self, project: str, keys: list[bytes], trajectory_id: str | None
    ) -> tuple[Tail | None, int]:
        """The tail that a request continues, within one trajectory if that is known, and how many
        of its keys, which begin with the longest, are not known here."""
        for unknown, key in enumerate(keys):
            tails = self._tails.get((project, key))
            if tails is None:
                continue
            fitting = [t for t in tails if trajectory_id in (None, t.trajectory_id)]
            if fitting:
                tail = fitting[-1]
                # Kept at the front, for a second branch that starts from the same answer.
                tails.remove(tail)
                tails.insert(0, tail)
                return tail, unknown
        return None, len(keys)
