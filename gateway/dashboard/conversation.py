"""A trajectory as a person reads it: threads of turns, each with what is new in it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from markupsafe import Markup, escape

from gateway.store.records import StoredChoice, StoredCompletion

_LONGEST = 20_000
"""Characters of one message that a page shows; the API has all of it."""
_MOST_WORDS = 1_500


@dataclass(slots=True)
class Said:
    """One message."""

    role: str
    text: str
    calls: list[str] = field(default_factory=list)
    reasoning: str = ""
    cut: int = 0
    """Characters that are not shown."""
    choice: int = 0
    """Of an answer, which of the completion's it is."""


@dataclass(slots=True)
class Turn:
    """One completion: the messages that came since the turn before, and the answers."""

    completion: StoredCompletion
    number: int
    """From 1, in the order in which the turns were asked for."""
    thread: int
    begins: bool
    """Whether a thread begins here."""
    new: list[Said]
    answers: list[Said]
    error: str | None

    @property
    def seconds(self) -> float:
        """From the request to the end of the answer."""
        return self.completion.finished_at - self.completion.created_at

    @property
    def choices(self) -> list[StoredChoice]:
        """The choices that can be rewarded."""
        return self.completion.choices


def said(message: Any, role: str = "") -> Said:
    """A message of any client, as text."""
    if not isinstance(message, dict):
        return Said(role or "?", str(message)[:_LONGEST])
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    calls = []
    for call in message.get("tool_calls") or ():
        function = (
            (call.get("function") or call.get("custom") or {}) if isinstance(call, dict) else {}
        )
        arguments = function.get("arguments", function.get("input", ""))
        calls.append(f"{function.get('name', '?')}({arguments})")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return Said(
        str(message.get("role") or role or "?"),
        text[:_LONGEST],
        calls,
        str(reasoning)[:_LONGEST],
        max(0, len(text) - _LONGEST),
    )


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    if isinstance(part.get("text"), str):
        return str(part["text"])
    return f"[{part.get('type', 'part')}]"


def turns(completions: list[StoredCompletion]) -> Iterator[Turn]:
    """The turns in the order in which they were asked for, with the thread that each is in."""
    thread_of: dict[str, int] = {}
    continued: set[tuple[str, int | None]] = set()
    counts = {completion.id: len(completion.messages) for completion in completions}
    threads = 0
    for number, completion in enumerate(completions, 1):
        above = completion.parent_id
        place = (above or "", completion.parent_choice)
        goes_on = above in thread_of and place not in continued
        if above is not None and goes_on:
            thread = thread_of[above]
            continued.add(place)
        else:
            threads += 1
            thread = threads
        thread_of[completion.id] = thread
        shared = counts[above] + 1 if above in counts else 0
        response = completion.response or {}
        error = response.get("error")
        yield Turn(
            completion,
            number,
            thread,
            not goes_on,
            [said(message) for message in completion.messages[shared:]],
            [_answer(choice, place) for place, choice in enumerate(response.get("choices") or ())],
            str(error.get("message", error)) if isinstance(error, dict) else error,
        )


def _answer(choice: dict[str, Any], place: int) -> Said:
    found = said(choice.get("message") or {"content": choice.get("text")}, "assistant")
    found.choice = choice.get("index", place)
    return found


def text_of(message: Any) -> str:
    """A message on one page of a group: its text, then its calls."""
    found = said(message or {})
    return "\n".join(part for part in (found.text, *(f"→ {call}" for call in found.calls)) if part)


def differing(text: str, other: str) -> Markup:
    """`text`, with the words marked that `other` does not have at that place."""
    mine, theirs = _words(text), _words(other)
    if text == other or len(mine) > _MOST_WORDS or len(theirs) > _MOST_WORDS:
        return escape(text)
    parts = []
    for kind, start, end, _, _ in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        piece = escape("".join(mine[start:end]))
        if not piece:
            continue
        parts.append(piece if kind == "equal" else Markup("<mark>{}</mark>").format(piece))
    return Markup("").join(parts)


def _words(text: str) -> list[str]:
    found: list[str] = []
    for word in text.split(" "):
        found += [" ", word] if found else [word]
    return found
