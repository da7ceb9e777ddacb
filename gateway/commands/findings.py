"""What `strop doctor` finds, and the small HTTP client that it looks with."""

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "error"]

_CLOCK_SECONDS = 5.0
"""Two clocks may differ by so much: HTTP's dates have whole seconds, and an answer takes time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    about: str
    text: str
    fix: str | None = None
    """What to do about it; None only where there is nothing to do."""


def good(about: str, text: str) -> Finding:
    """It is as it should be."""
    return Finding("ok", about, text)


def note(about: str, text: str, fix: str) -> Finding:
    """It could not be told, or is good to know; `fix` says how it can be told, or what to do."""
    return Finding("note", about, text, fix)


def doubtful(about: str, text: str, fix: str) -> Finding:
    """It works, and will bite."""
    return Finding("warning", about, text, fix)


def wrong(about: str, text: str, fix: str) -> Finding:
    """It does not work."""
    return Finding("error", about, text, fix)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said; status 0: nothing at all, and `body` says why."""

    status: int
    body: Any
    date: float | None = None
    """Its clock, in Unix seconds."""

    def says(self) -> str:
        """The message of an error, however it is wrapped."""
        body = self.body
        if isinstance(body, dict):
            body = body.get("error", body.get("detail", body.get("message", body)))
        if isinstance(body, dict):
            body = body.get("message", body)
        return str(body)[:300]


def fetch(
    url: str, body: Any = None, *, headers: dict[str, str] | None = None, timeout: float = 20.0
) -> Answer:
    """GET, or POST where there is a body."""
    data = json.dumps(body).encode() if body is not None else None
    sent = {"content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return Answer(response.status, _parsed(response.read()), _date(response.headers))
    except urllib.error.HTTPError as error:
        return Answer(error.code, _parsed(error.read()), _date(error.headers))
    except (OSError, ValueError) as error:
        return Answer(0, str(getattr(error, "reason", error)))


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _date(headers: Any) -> float | None:
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (TypeError, ValueError):
        return None


def clock(about: str, theirs: float | None) -> Finding | None:
    """Whether another machine's clock agrees with this one's; None if it says nothing."""
    if theirs is None:
        return None
    ahead = theirs - time.time()
    if abs(ahead) <= _CLOCK_SECONDS:
        return good(about, "its clock agrees with this machine's")
    direction = "ahead" if ahead > 0 else "behind"
    return doubtful(
        about,
        f"its clock is {abs(ahead):.0f} s {direction}: deadlines and leases go by the clock",
        "Run an NTP client, such as chrony, on both machines.",
    )
