"""Finding the trajectory, group and thread of a request, in memory first and then in the store."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.exc import OperationalError

from gateway.capture.attribution import Claims, task_of
from gateway.capture.threads import ThreadIndex, beginnings
from gateway.store import Database, queries
from gateway.store.ids import new_id
from gateway.store.journal import connection_lost
from gateway.store.records import Tail, TrajectoryRef

log = logging.getLogger("strop.placement")

T = TypeVar("T")

_REMEMBERED = 12_000
"""Trajectories and threads, of about 1.3 KB: to ask the store for an older one costs a request
about a millisecond."""

_AWAY_SECONDS = 1.0
"""For which the store is not asked again after it did not answer: not every request should wait
for a connection that cannot be had."""


class _StoreAway(Exception):
    pass


@dataclass(slots=True)
class Place:
    """What is remembered of a trajectory."""

    group_id: str
    split: str
    parent_id: str | None
    task: str | None = None
    versions: dict[str, int] = field(default_factory=dict)
    """Policy → the version that the trajectory began with."""
    guessed: bool = False
    """The store, which may know better, could not be asked."""


@dataclass(slots=True)
class Placement:
    """Where a request belongs."""

    ref: TrajectoryRef
    place: Place
    tail: Tail | None
    digest: Any
    """Running digest of the messages; `threads.extend` goes on from it."""


class Placements:
    """Remembers recent trajectories and threads; the store knows the rest."""

    def __init__(self, database: Database, size: int = _REMEMBERED):
        self._database = database
        self._size = size
        self._places: OrderedDict[tuple[str, str], Place] = OrderedDict()
        self._away_until = 0.0
        self.threads = ThreadIndex(size)

    async def find(
        self, project: str, policy: str, claims: Claims, messages: list[Any], tools: Any
    ) -> Placement:
        """The placement of a request, as the design's five ways have it."""
        keys, digest = beginnings(messages)
        tail, unknown = self.threads.take(project, keys, claims.trajectory)
        if unknown:
            # A later turn than one known here may have been answered by another process.
            tail = await self._continued(project, keys[:unknown], claims.trajectory) or tail
        trajectory_id, attribution = claims.trajectory, claims.attribution
        if trajectory_id is None and tail is not None:
            trajectory_id, attribution = tail.trajectory_id, "continuation"
        place, guessed = None, False
        if trajectory_id is None:
            trajectory_id = new_id("traj-")
        else:
            place = self._places.get((project, trajectory_id))
            if place is None or place.guessed:
                place, guessed = await self._known(project, trajectory_id, policy, place)
        if place is None:
            task = task_of(messages, tools)
            place = Place(
                group_id=claims.group or f"task-{task}",
                split=claims.split or "train",
                parent_id=claims.parent,
                task=task,
            )
        place.guessed = guessed
        self._remember(project, trajectory_id, place)
        ref = TrajectoryRef(
            id=trajectory_id,
            group_id=place.group_id,
            attribution=attribution,
            split=place.split,
            parent_id=place.parent_id,
            task=place.task,
            traceparent=claims.traceparent,
        )
        return Placement(ref, place, tail, digest)

    def _remember(self, project: str, trajectory_id: str, place: Place) -> None:
        key = (project, trajectory_id)
        self._places[key] = place
        self._places.move_to_end(key)
        if len(self._places) > self._size:
            self._places.popitem(last=False)

    async def _continued(
        self, project: str, keys: list[bytes], trajectory_id: str | None
    ) -> Tail | None:
        try:
            return await self._ask(lambda: self._stored_tail(project, keys, trajectory_id))
        except _StoreAway:
            return None

    async def _known(
        self, project: str, trajectory_id: str, policy: str, guess: Place | None
    ) -> tuple[Place | None, bool]:
        """What the store knows of a trajectory, else the guess; and whether that stays a guess."""
        try:
            found = await self._ask(lambda: self._stored(project, trajectory_id, policy))
        except _StoreAway:
            return guess, True
        return found or guess, False

    async def _ask(self, read: Callable[[], T]) -> T:
        if time.monotonic() < self._away_until:
            raise _StoreAway
        try:
            return await asyncio.to_thread(read)
        except OperationalError as error:
            if not connection_lost(error):
                raise
            log.warning("taken for new, as the database does not answer: %s", error.orig)
            self._away_until = time.monotonic() + _AWAY_SECONDS
            raise _StoreAway from None

    def _stored_tail(
        self, project: str, keys: list[bytes], trajectory_id: str | None
    ) -> Tail | None:
        with self._database.read() as connection:
            return queries.find_tail(connection, project, keys, trajectory_id)

    def _stored(self, project: str, trajectory_id: str, policy: str) -> Place | None:
        with self._database.read() as connection:
            found = queries.trajectory_place(connection, project, trajectory_id, policy)
        if found is None:
            return None
        group_id, split, parent_id, version = found
        versions = {policy: version} if version is not None else {}
        return Place(group_id, split, parent_id, versions=versions)
