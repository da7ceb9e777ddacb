"""Empties one project's outbox into its Langfuse, and keeps at it however long that is away."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from gateway.store import outbox
from gateway.store.bulk import new_rows
from gateway.store.outbox import Entry
from gateway.store.tracing_models import LangfuseTrace
from gateway.tracing.content import size
from gateway.tracing.exporter import Exporter, Refused, TryAgain
from gateway.tracing.observations import Observation, observations
from gateway.tracing.scores import Score, scores
from gateway.tracing.writes import Writes

log = logging.getLogger("strop.langfuse")

BATCH = 200
"""Entries that are read, and most scores in one request. Of spans there are twice as many, where
each completion has a trajectory of its own: Langfuse refuses more than 500."""

REQUEST_BYTES = 3_000_000
"""Content of one request of spans, about; the exporter knows what they really are."""

SCORES_BYTES = 700_000
"""Of scores: its API takes 1 MB."""

_LONGEST_WAIT = 60.0

_NOTE = new_rows(LangfuseTrace)


@dataclass(slots=True)
class _Part:
    """What goes into one request, and the entries that it settles."""

    things: list[Observation | Score] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    bytes: int = 0


class Sender:
    """One project's outbox.

    `step` sends a batch; what is wrong with a single thing sets that one aside, and what is wrong
    with Langfuse makes it wait longer and longer, up to a minute.
    """

    def __init__(
        self,
        writes: Writes,
        project: str,
        exporter: Exporter,
        public_url: str,
        batch: int = BATCH,
    ):
        self.project = project
        self._writes = writes
        self._database = writes.database
        self._exporter = exporter
        self._public_url = public_url
        self._batch = batch
        self.failures = 0
        """Attempts in a row that Langfuse did not take."""
        self.not_before = 0.0
        """On the monotonic clock: when Langfuse is to be asked again."""
        self.oldest: float | None = None
        """Unix seconds since which the oldest has waited that the last batch held."""
        self.sent = 0
        """Spans and scores that Langfuse has accepted, repeats among them."""

    def start(self) -> None:
        """Note in the database that the project is traced; to be repeated now and then."""
        self._writes.run(lambda c: outbox.trace_project(c, self.project, time.time()))

    def step(self) -> int:
        """Send what waits, at most a batch; returns how many entries were settled."""
        if time.monotonic() < self.not_before:
            return 0
        with self._database.read() as connection:
            entries = outbox.pending(connection, self.project, self._batch)
        self.oldest = entries[0].at if entries else None
        if not entries:
            return 0
        try:
            settled = self._send(entries)
        except TryAgain as error:
            self._wait(error)
            return 0
        if self.failures:
            log.warning("the Langfuse of %s is back", self.project)
        self.failures = 0
        return settled

    def _send(self, entries: Sequence[Entry]) -> int:
        with self._database.read() as connection:
            spans, span_rows = self._spans(connection, entries)
            found, score_rows = self._scores(connection, entries)
        settled = {row for part in (*spans, *found) for row in part.rows}
        # Of what was deleted in the meantime there is nothing to send.
        gone = [entry.row for entry in entries if entry.row not in settled]
        for part in spans:
            self._deliver(part, self._export_spans, span_rows)
        for part in found:
            self._deliver(part, self._export_scores, score_rows)
        if gone:
            self._writes.run(lambda c: outbox.delivered(c, gone))
        return len(entries)

    def _spans(
        self, connection: Connection, entries: Sequence[Entry]
    ) -> tuple[list[_Part], dict[str, list[int]]]:
        rows = _rows_of(entries, outbox.COMPLETION)
        if not rows:
            return [], rows
        made = observations(connection, self.project, list(rows), self._public_url)
        things: list[tuple[Observation | Score, list[int], int]] = [
            (each, rows.get(each.completion_id or "", []), _bytes_of(each)) for each in made
        ]
        return _parts(things, REQUEST_BYTES, 2 * self._batch), rows

    def _scores(
        self, connection: Connection, entries: Sequence[Entry]
    ) -> tuple[list[_Part], dict[str, list[int]]]:
        rows = _rows_of(entries, outbox.REWARD)
        if not rows:
            return [], rows
        made = scores(connection, self.project, list(rows), self._public_url)
        things: list[tuple[Observation | Score, list[int], int]] = [
            (
                each,
                [row for reward in each.reward_ids for row in rows.get(reward, ())],
                size(each.body),
            )
            for each in made
        ]
        return _parts(things, SCORES_BYTES, self._batch), rows

    def _deliver(
        self,
        part: _Part,
        export: Callable[[Sequence[Observation | Score]], None],
        rows: dict[str, list[int]],
    ) -> None:
        refused: dict[str, str] = {}
        self._halve(part.things, export, refused)
        wrong: dict[str, list[int]] = {}
        for thing in part.things:
            if thing.id in refused:
                names = thing.reward_ids if isinstance(thing, Score) else (thing.completion_id,)
                wrong.setdefault(refused[thing.id], []).extend(
                    row for name in names for row in rows.get(name or "", ())
                )
        bad = {row for found in wrong.values() for row in found}
        traces = self._traces_of(part.things)

        def settle(connection: Connection) -> None:
            _NOTE[connection.dialect.name].run(connection, traces)
            outbox.delivered(connection, [row for row in part.rows if row not in bad])
            for error, found in wrong.items():
                outbox.refused(connection, found, error)

        self._writes.run(settle)

    def _halve(
        self,
        things: Sequence[Observation | Score],
        export: Callable[[Sequence[Observation | Score]], None],
        refused: dict[str, str],
    ) -> None:
        """Send things; of those that are refused together, find which of them it is."""
        try:
            export(things)
        except Refused as error:
            if len(things) > 1:
                middle = len(things) // 2
                self._halve(things[:middle], export, refused)
                self._halve(things[middle:], export, refused)
                return
            refused[things[0].id] = str(error)
            log.error("%s of %s is set aside: %s", things[0].id, self.project, error)
        else:
            self.sent += len(things)

    def _export_spans(self, things: Sequence[Observation | Score]) -> None:
        self._exporter.send_spans(
            [self._exporter.span(each) for each in things if isinstance(each, Observation)]
        )

    def _export_scores(self, things: Sequence[Observation | Score]) -> None:
        bodies = [s.body for s in things if isinstance(s, Score) and s.body is not None]
        if bodies:
            self._exporter.send_scores(bodies)
        for score in things:
            if isinstance(score, Score) and score.body is None:
                self._exporter.delete_score(score.id)

    def _traces_of(self, things: Sequence[Observation | Score]) -> list[dict[str, str]]:
        places = {(t.trace_id, t.trajectory_id) for t in things if isinstance(t, Observation)}
        return [
            {"project": self.project, "trace_id": trace, "trajectory_id": trajectory}
            for trace, trajectory in sorted(places)
        ]

    def _wait(self, error: TryAgain) -> None:
        self.failures += 1
        seconds = min(_LONGEST_WAIT, 0.5 * 2 ** min(self.failures - 1, 10))
        seconds *= random.uniform(0.8, 1.2)
        if error.after is not None:
            seconds = max(seconds, min(error.after, 5 * _LONGEST_WAIT))
        self.not_before = time.monotonic() + seconds
        if self.failures in (1, 5) or self.failures % 50 == 0:
            log.warning("%s; %s waits, nothing is lost", error, self.project)


def _rows_of(entries: Sequence[Entry], kind: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry in entries:
        if entry.kind == kind:
            found.setdefault(entry.ref, []).append(entry.row)
    return found


def _bytes_of(observation: Observation) -> int:
    texts = (observation.input or "", observation.output or "")
    return sum(len(text.encode()) for text in texts) + 2_000


def _parts(
    things: Sequence[tuple[Observation | Score, list[int], int]], limit: int, most: int
) -> list[_Part]:
    parts: list[_Part] = []
    for thing, rows, weight in things:
        if not parts or parts[-1].bytes + weight > limit or len(parts[-1].things) >= most:
            parts.append(_Part())
        parts[-1].things.append(thing)
        parts[-1].rows.extend(rows)
        parts[-1].bytes += weight
    return parts
