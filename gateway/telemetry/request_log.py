"""One line a request: who, what, how long. Never a prompt, an answer, a key or a query string."""

import asyncio
import sys
import time
from typing import Any, Literal

import orjson

from gateway.telemetry.observation import Observation

_FLUSH_SECONDS = 0.1
_MOST_LINES = 50_000
"""Kept while whoever reads the log does not; further ones are counted and dropped."""


class RequestLog:
    """Writes to the standard error, in a thread, a tenth of a second's lines at once: a reader
    that is slow must not hold up the requests."""

    def __init__(self, form: Literal["text", "json"]):
        # The one of now: whoever redirects it later means something else.
        self._stream = sys.stderr
        self._line = _json if form == "json" else _text
        self._lines: list[str] = []
        self._dropped = 0
        self._flushing = False

    def add(self, seen: Observation) -> None:
        """Log one request that is over."""
        if len(self._lines) >= _MOST_LINES:
            self._dropped += 1
            return
        self._lines.append(self._line(seen))
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._start)

    def _start(self) -> None:
        asyncio.get_running_loop().run_in_executor(None, self.flush)

    def flush(self) -> None:
        """Write what waits. Blocks."""
        lines, self._lines = self._lines, []
        dropped, self._dropped = self._dropped, 0
        self._flushing = False
        if dropped:
            lines.append(f"{dropped} lines of the request log were dropped\n")
        if lines:
            self._stream.write("".join(lines))
            self._stream.flush()


def _fields(seen: Observation) -> dict[str, Any]:
    scope = seen.scope
    fields: dict[str, Any] = {
        "time": round(seen.ended, 3),
        "level": "info",
        "logger": "strop.request",
        "method": scope["method"],
        "path": scope["path"],
        "status": seen.status,
        "seconds": round(seen.ended - seen.began, 4),
    }
    if seen.project:
        fields["project"] = seen.project
    captured = seen.captured
    if captured is not None:
        fields |= {
            "policy": captured.policy,
            "version": captured.version,
            "completion": captured.id,
            "trajectory": captured.trajectory.id,
            "group": captured.trajectory.group_id,
            "stream": captured.stream,
            "prompt_tokens": captured.prompt_tokens,
            "completion_tokens": captured.completion_tokens,
            "replica": captured.replica,
            "outcome": captured.status,
            "reason": captured.reason,
        }
        if captured.first_token_at is not None:
            fields["first_token_seconds"] = round(captured.first_token_at - seen.began, 4)
        if seen.committed:
            fields["commit_seconds"] = round(seen.committed - captured.finished_at, 4)
    return fields


def _json(seen: Observation) -> str:
    return orjson.dumps(_fields(seen), option=orjson.OPT_APPEND_NEWLINE).decode()


def _text(seen: Observation) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seen.ended))
    scope = seen.scope
    # A path may hold what a client put there; nothing of it may look like a line of its own.
    path = scope["path"].encode("unicode_escape").decode()
    milliseconds = (seen.ended - seen.began) * 1000
    line = f"{at}Z {scope['method']} {path} {seen.status} {milliseconds:.1f}ms"
    captured = seen.captured
    if captured is not None:
        version = f"@{captured.version}" if captured.version is not None else ""
        line += f" {captured.policy}{version} {captured.id}"
        line += f" {captured.prompt_tokens or 0}+{captured.completion_tokens or 0} tokens"
        if captured.reason is not None:
            line += f" {captured.reason}"
    return line + "\n"
