"""Looks after what versions earn: takes a version back that is worse, and decides about trials.

The statistics are those of `gateway.comparison`. Every gateway may run this: a look and what
follows from it are one transaction, and the first one wins.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection

from gateway import adapters, comparison
from gateway.backends.vllm import ReplicaRefused, ReplicaUnavailable
from gateway.comparison import Comparison, Scored
from gateway.proofs import ProbeFailed
from gateway.publisher import Publisher
from gateway.store import Database, queries, statistics, trials
from gateway.store.policy_settings import PolicySettings
from gateway.store.writer import Writer

log = logging.getLogger("strop.guard")

Json = dict[str, Any]

_CLOCKS = 60.0
"""Seconds by which clocks of two machines may differ."""
_SERVED = ("serving", "retired")


@dataclass(frozen=True, slots=True)
class Look:
    """One comparison of a version with an earlier one, and what it is held against."""

    version: int
    looks: int
    """Looks at the version before this one."""
    other: int
    candidates: int
    """Earlier versions that `other` is the best of."""
    split: str
    level: float
    """That this look has, after repeated looks and the choice among candidates are paid for."""
    count: int
    """Samples of the version that there are."""
    result: Comparison

    @property
    def worse(self) -> bool:
        """Whether the version is worse by more than chance."""
        return self.result.worse <= self.level

    @property
    def better(self) -> bool:
        """Whether the version is better by more than chance."""
        return self.result.better <= self.level

    def numbers(self) -> Json:
        """For the database."""
        return {
            "at": time.time(),
            "look": self.looks + 1,
            "against": self.other,
            "candidates": self.candidates,
            "split": self.split,
            "level": self.level,
            "p_worse": self.result.worse,
            "p_better": self.result.better,
            **self.result.numbers(),
        }

    def words(self, name: str) -> str:
        """What was found."""
        kind = "held-out" if self.split == "eval" else "training"
        return (
            f"{name}@{self.version} earned {self.result.words()} for @{self.other} "
            f"({kind} rewards; permutation test, look {self.looks + 1})"
        )


class Guard:
    """The task: looks at every policy again and again, and acts."""

    def __init__(self, database: Database, writer: Writer, publisher: Publisher, poll: float):
        self._database = database
        self._writer = writer
        self._publisher = publisher
        self._poll = poll
        self._counted: dict[tuple[str, str, int], int] = {}
        self._trouble: type[Exception] | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
                self._trouble = None
            except Exception as error:
                # Said once, and not at every poll of an outage.
                if type(error) is not self._trouble:
                    log.exception("looking after versions failed; trying again until it succeeds")
                self._trouble = type(error)
            await asyncio.sleep(self._poll)

    async def look(self) -> None:
        """Look once at every policy, where this process is the one that publishes."""
        if not self._publisher.publishes():
            return
        for row in await asyncio.to_thread(self._policies):
            try:
                settings = PolicySettings.model_validate(row["settings"])
            except ValidationError:
                continue  # The trainer says so, at every visit.
            if row["canary"] is not None:
                await self._judge_trial(row, settings)
            elif settings.guard.enabled and row["alias"] > 0:
                await self._judge_alias(row, settings)

    def _policies(self) -> list[queries.Row]:
        with self._database.read() as connection:
            return queries.all_policies(connection)

    async def _judge_alias(self, row: queries.Row, settings: PolicySettings) -> None:
        project, name = row["project"], row["name"]
        look = await asyncio.to_thread(self._compare_alias, row, settings)
        if look is None:
            return
        if not look.worse:
            await self._writer.run(
                lambda c: trials.looked(c, project, name, look.version, look.looks, look.numbers())
            )
            return
        factor = settings.guard.rate_factor
        why = (
            f"{look.words(name)}: worse by more than chance "
            f"(p = {look.result.worse:.2g}, held against {look.level:.2g}). @{look.other} serves "
            f"again, and training goes on from it with {factor:g} times the learning rate."
        )
        try:
            await self._publisher.restore(project, name, look.other)
        except (ProbeFailed, ReplicaRefused, ReplicaUnavailable, adapters.BrokenAdapter) as error:
            log.error("%s@%d should serve again and cannot: %s", name, look.other, error)
            self._counted.clear()
            return

        def act(connection: Connection) -> bool:
            if not trials.looked(
                connection, project, name, look.version, look.looks, look.numbers()
            ):
                return False
            return trials.withdrawn(
                connection, project, name, look.version, look.other, why, look.numbers(), factor
            )

        if await self._writer.run(act):
            log.warning("%s", why)
            self._publisher.poke()

    async def _judge_trial(self, row: queries.Row, settings: PolicySettings) -> None:
        project, name, number = row["project"], row["name"], row["canary"]
        look = await asyncio.to_thread(self._compare_trial, row, settings)
        decision, why = self._verdict(row, settings, look)
        if look is None and decision is None:
            return
        factor = settings.guard.rate_factor if decision == "dropped" and look else 1.0
        numbers = look.numbers() if look is not None else {}

        def act(connection: Connection) -> bool:
            if look is not None and not trials.looked(
                connection, project, name, number, look.looks, numbers
            ):
                return False
            if decision == "promoted":
                return trials.promoted(connection, project, name, number, why, numbers)
            if decision == "dropped":
                return trials.dropped(connection, project, name, number, why, numbers, factor)
            return False

        if await self._writer.run(act):
            log.info("%s", why)
            self._publisher.poke()

    def _verdict(
        self, row: queries.Row, settings: PolicySettings, look: Look | None
    ) -> tuple[str | None, str]:
        name, number, canary = row["name"], row["canary"], settings.canary
        if canary.share == 0:
            return "promoted", f"{name}@{number} is promoted: trials were switched off"
        if look is not None:
            found = look.words(name)
            if look.worse:
                return "dropped", (
                    f"{found}: worse by more than chance (p = {look.result.worse:.2g}, held "
                    f"against {look.level:.2g}). It is dropped; training goes on from "
                    f"@{row['alias']} with {settings.guard.rate_factor:g} times the learning rate."
                )
            if look.better:
                return "promoted", (
                    f"{found}: better by more than chance (p = {look.result.better:.2g}, held "
                    f"against {look.level:.2g}). It is promoted."
                )
            if look.count >= canary.trajectories:
                return "promoted", (
                    f"{found}: not worse by more than chance (p = {look.result.worse:.2g}) after "
                    f"the {canary.trajectories} {look.result.unit} of a trial. It is promoted."
                )
        deadline = canary.deadline_seconds
        if deadline is not None and time.time() > row["canary_since"] + deadline:
            return "dropped", (
                f"{name}@{number} is dropped: its trial was not decided within {deadline:g} seconds"
            )
        return None, ""

    def _compare_alias(self, row: queries.Row, settings: PolicySettings) -> Look | None:
        """The alias against the best earlier version, if it is time for a look."""
        project, name, alias = row["project"], row["name"], row["alias"]
        with self._database.read() as connection:
            version = queries.version(connection, project, name, alias)
            if version is None or not self._due(connection, version, settings, None):
                return None
            earlier = [
                v["number"]
                for v in queries.versions(connection, project, name)
                if v["number"] < alias and v["state"] in _SERVED and v["deleted_at"] is None
            ]
            rewards = statistics.trajectory_rewards(
                connection, project, name, versions=[alias, *earlier]
            )
        return _best_look(version, earlier, rewards, settings)

    def _compare_trial(self, row: queries.Row, settings: PolicySettings) -> Look | None:
        """The version on trial against the alias, on trajectories since the trial began."""
        project, name, number = row["project"], row["name"], row["canary"]
        with self._database.read() as connection:
            version = queries.version(connection, project, name, number)
            if version is None or not self._due(
                connection, version, settings, settings.canary.trajectories
            ):
                return None
            rewards = statistics.trajectory_rewards(
                connection,
                project,
                name,
                versions=[number, row["alias"]],
                since=row["canary_since"],
            )
        return _best_look(
            version, [row["alias"]], rewards, settings, at_most=settings.canary.trajectories
        )

    def _due(
        self,
        connection: Connection,
        version: queries.Row,
        settings: PolicySettings,
        at_most: int | None,
    ) -> bool:
        """Cheap, and never False where a look is due."""
        since = (version["published_at"] or version["created_at"]) - _CLOCKS
        project, name = version["project"], version["policy"]
        count = statistics.rewarded_since(connection, project, name, since)
        key = (project, name, version["number"])
        if count < _needed(settings, version["looks"], at_most) or self._counted.get(key) == count:
            return False
        self._counted[key] = count
        return True


def _needed(settings: PolicySettings, looks: int, at_most: int | None) -> int:
    needed = comparison.next_look(settings.guard.first_look, looks)
    # A trial ends with a look at its full size.
    return needed if at_most is None else min(needed, at_most)


def _best_look(
    version: queries.Row,
    earlier: list[int],
    rewards: list[statistics.TrajectoryReward],
    settings: PolicySettings,
    at_most: int | None = None,
) -> Look | None:
    """Compare a version with the best of earlier ones, on the rewards that the settings name."""
    number, looks, guard = version["number"], version["looks"], settings.guard
    needed = _needed(settings, looks, at_most)
    for split in ("eval", "train") if guard.split == "auto" else (guard.split,):
        scored: dict[int, list[Scored]] = {}
        for one in rewards:
            if one.split == split:
                scored.setdefault(one.version, []).append(
                    Scored(one.group_id, one.reward, one.created_at)
                )
        if number not in scored:
            continue
        pairs = {
            other: comparison.samples_of(scored[number], scored[other])
            for other in earlier
            if other in scored
        }
        # Whether there is enough is decided on counts alone, before any reward is looked at.
        pairs = {
            other: s
            for other, s in pairs.items()
            if s.new_count >= needed and s.old_count >= guard.first_look
        }
        if not pairs:
            continue
        best = max(pairs, key=lambda other: pairs[other].old.mean() - pairs[other].new.mean())
        level = comparison.level_of_look(guard.level, looks + 1) / len(pairs)
        result = comparison.compare(pairs[best], level, seed=number * 64 + looks)
        count = pairs[best].new_count
        return Look(number, looks, best, len(pairs), split, level, count, result)
    return None
