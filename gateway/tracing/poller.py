"""Scores that people and evaluators put on traces in Langfuse → rewards.

Langfuse lists scores by their timestamp and does not say what was edited or deleted. So there are
two ways of looking: often for what is new, and now and then at all scores of the last weeks, which
are compared with what is known of them.

A score is one reward at a time. An edit withdraws it and posts another; a deletion withdraws it.
What is known of a score changes in the same transaction as the reward, so that each is taken once,
however often it is read.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, select, update

from gateway.store import codec, outbox, rewards, withdrawals
from gateway.store.base import insert_into
from gateway.store.rewards import NewReward
from gateway.store.tracing_models import LangfuseCursor, LangfuseScore
from gateway.tracing import ids
from gateway.tracing.exporter import Exporter, Refused, TryAgain, classified
from gateway.tracing.scores import SOURCE
from gateway.tracing.settings import LangfuseSettings, ScoreMap
from gateway.tracing.targets import Target, target_of
from gateway.tracing.writes import Writes

log = logging.getLogger("strop.langfuse")

_PAGE = 100
_OVERLAP = 600.0
"""Seconds before the newest score that are read again: scores do not arrive in order."""

_MANY = 20
"""So many deletions at once, and more than half of all: it is rather another Langfuse."""


@dataclass(slots=True, frozen=True)
class _Found:
    """A score as it was read."""

    id: str
    name: str
    value: Any
    kind: str
    source: str
    comment: str | None
    at: float
    trace_id: str | None
    observation_id: str | None
    author: str | None


class Poller:
    """Reads the scores of one project."""

    def __init__(
        self, writes: Writes, project: str, exporter: Exporter, settings: LangfuseSettings
    ):
        self._writes = writes
        self._database = writes.database
        self._project = project
        self._api = exporter.api
        self._settings = settings
        self._failures = 0
        self.not_before = 0.0
        """On the monotonic clock: when to look again."""

    def step(self) -> None:
        """Look for what is new, or compare all of it, if it is time for either."""
        if not self._settings.scores or time.monotonic() < self.not_before:
            return
        self.not_before = time.monotonic() + self._settings.poll_seconds
        try:
            self._look()
        except (TryAgain, Refused) as error:
            self._failures += 1
            wait = min(300.0, self._settings.poll_seconds * 2 ** min(self._failures, 10))
            self.not_before = time.monotonic() + wait
            if self._failures in (1, 5) or self._failures % 50 == 0:
                log.warning("the scores of %s cannot be read: %s", self._project, error)
        else:
            self._failures = 0

    def _look(self) -> None:
        with self._database.read() as connection:
            query = select(LangfuseCursor.position, LangfuseCursor.compared_at)
            row = connection.execute(query.where(LangfuseCursor.project == self._project)).one()
        if time.time() - row.compared_at >= self._settings.compare_seconds:
            self._compare()
        else:
            self._take_all(row.position - _OVERLAP)

    def _compare(self) -> None:
        began = time.time()
        since = began - self._settings.compare_days * 86_400
        seen = self._take_all(since)
        query = select(LangfuseScore.id).where(
            LangfuseScore.project == self._project, LangfuseScore.at >= since
        )
        with self._database.read() as connection:
            known = set(connection.execute(query).scalars())
        missing = sorted(known - seen)
        there = self._still_there(missing)
        gone = [each for each in missing if each not in there]
        if len(gone) >= _MANY and 2 * len(gone) > len(known):
            log.error(
                "%d of the %d scores that were rewards in %s are gone from Langfuse at once. Is it "
                "another project there? No reward is withdrawn.",
                len(gone),
                len(known),
                self._project,
            )
            gone = []

        def settle(connection: Connection) -> None:
            for score_id in gone:
                self._drop(connection, score_id, began)
            connection.execute(
                update(LangfuseCursor)
                .where(LangfuseCursor.project == self._project)
                .values(compared_at=began)
            )

        self._writes.run(settle)

    def _still_there(self, score_ids: Sequence[str]) -> set[str]:
        # A score may have been renamed, or moved in time, out of what was listed.
        found: set[str] = set()
        for start in range(0, len(score_ids), _PAGE):
            chunk = score_ids[start : start + _PAGE]
            for page in self._pages(id=",".join(chunk)):
                found |= {score.id for score in page}
        return found

    def _take_all(self, since: float) -> set[str]:
        """Take over all scores since a time; returns their ids."""
        names = list(self._settings.scores)
        options: dict[str, Any] = {"from_timestamp": datetime.fromtimestamp(max(0.0, since), UTC)}
        if not any("," in name for name in names):
            options["name"] = ",".join(names)
        seen: set[str] = set()
        newest = 0.0
        for page in self._pages(**options):
            seen |= {score.id for score in page}
            newest = max([newest, *(score.at for score in page)])
            wanted = [s for s in page if s.name in names and not s.id.startswith(ids.SCORE_PREFIX)]
            if wanted:
                self._writes.run(partial(self._take_page, page=wanted))
        # Only when all pages were read: the oldest come last.
        position = min(newest, time.time())
        moved = (
            update(LangfuseCursor)
            .where(LangfuseCursor.project == self._project, LangfuseCursor.position < position)
            .values(position=position)
        )
        self._writes.run(lambda c: c.execute(moved) and None)
        return seen

    def _take_page(self, connection: Connection, page: Sequence[_Found]) -> None:
        for score in page:
            self._take(connection, score)

    def _pages(self, **options: Any) -> Iterator[list[_Found]]:
        cursor: str | None = None
        while True:
            answer = self._ask(
                partial(
                    self._api.scores.get_many,
                    limit=_PAGE,
                    cursor=cursor,
                    fields="details,subject,annotation",
                    request_options={"max_retries": 0},
                    **options,
                )
            )
            yield [_found(score) for score in answer.data]
            if answer.meta.cursor is None or answer.meta.cursor == cursor:
                return
            cursor = answer.meta.cursor

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:
            raise classified(error) from error

    def _take(self, connection: Connection, score: _Found) -> None:
        mapping = self._settings.scores[score.name]
        value = worth(mapping, score.kind, score.value)
        if score.source not in mapping.sources:
            value = None
        target = None
        if value is not None:
            target = target_of(connection, self._project, score.trace_id, score.observation_id)
            if target is None:
                # Not ours, or not sent yet: the next comparison looks again.
                return
        digest = codec.digest_json([value, mapping.reward, score.comment, _key(target)])
        old = connection.execute(
            select(LangfuseScore.reward_id).where(
                LangfuseScore.project == self._project, LangfuseScore.id == score.id
            )
        ).scalar_one_or_none()
        if not self._changed(connection, score, digest):
            return
        now = time.time()
        reward_id = None
        if value is not None and target is not None:
            reward = _reward(mapping, score, value, target, now)
            (stored,), _ = rewards.post(connection, self._project, [reward])
            reward_id = stored.id
            outbox.add(connection, outbox.REWARD, [(self._project, reward_id)], now)
        if old is not None:
            # Only now: where the value is the same as before, nothing is to be learnt anew.
            self._withdraw(connection, old, now)
        connection.execute(
            update(LangfuseScore)
            .where(LangfuseScore.project == self._project, LangfuseScore.id == score.id)
            .values(reward_id=reward_id)
        )

    def _changed(self, connection: Connection, score: _Found, digest: bytes) -> bool:
        # Another process that takes the same score waits here, and then finds it taken.
        row = {"project": self._project, "id": score.id, "digest": digest, "at": score.at}
        statement = insert_into(connection, LangfuseScore).values(row)
        changed = connection.execute(
            statement.on_conflict_do_update(
                index_elements=["project", "id"],
                set_={"digest": digest, "at": score.at},
                where=LangfuseScore.digest != digest,
            ).returning(LangfuseScore.id)
        )
        return changed.first() is not None

    def _drop(self, connection: Connection, score_id: str, now: float) -> None:
        row = connection.execute(
            delete(LangfuseScore)
            .where(LangfuseScore.project == self._project, LangfuseScore.id == score_id)
            .returning(LangfuseScore.reward_id)
        ).one_or_none()
        if row is not None and row.reward_id is not None:
            self._withdraw(connection, row.reward_id, now)

    def _withdraw(self, connection: Connection, reward_id: str, now: float) -> None:
        gone = withdrawals.withdraw(connection, self._project, [reward_id], now)
        outbox.add(connection, outbox.REWARD, [(self._project, each) for each in gone], now)


def worth(mapping: ScoreMap, kind: str, value: Any) -> float | None:
    """A score's value as a reward; None where it has no place on the scale."""
    if kind in ("NUMERIC", "BOOLEAN"):
        return float(value) * mapping.scale + mapping.offset
    if kind == "CATEGORICAL":
        return mapping.categories.get(str(value))
    return None


def _key(target: Target | None) -> list[str | None]:
    return [target.trajectory_id, target.completion_id] if target is not None else []


def _reward(
    mapping: ScoreMap, score: _Found, value: float, target: Target, now: float
) -> NewReward:
    details = {
        "score_id": score.id,
        "score_name": score.name,
        "score_source": score.source,
        "author": score.author,
        "at": score.at,
    }
    completion = target.completion_id
    return NewReward(
        value,
        mapping.reward,
        completion_id=completion,
        trajectory_id=target.trajectory_id if completion is None else None,
        comment=score.comment,
        metadata={key: value for key, value in details.items() if value is not None},
        source=SOURCE,
        created_at=now,
    )


def _found(score: Any) -> _Found:
    subject = score.subject
    kind = subject.kind if subject is not None else None
    trace_id = observation_id = None
    if kind == "trace":
        trace_id = subject.id
    elif kind == "observation":
        trace_id, observation_id = subject.trace_id, subject.id
    return _Found(
        id=score.id,
        name=score.name,
        value=score.value,
        kind=score.data_type,
        source=str(getattr(score.source, "value", score.source)),
        comment=score.comment,
        at=score.timestamp.timestamp(),
        trace_id=trace_id,
        observation_id=observation_id,
        author=score.author_user_id,
    )
