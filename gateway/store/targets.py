"""What rewards are posted against, looked up for many of them at once."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, select

from gateway.store.ids import new_id
from gateway.store.models import Choice, Completion, Trajectory
from gateway.store.waiting import GroupKey

_AT_ONCE = 10_000
"""Ids in one question."""


@dataclass(slots=True)
class NewReward:
    """A reward as it is posted: against a completion (and choice) or a trajectory."""

    reward: float
    name: str = "reward"
    completion_id: str | None = None
    choice: int | None = None
    trajectory_id: str | None = None
    comment: str | None = None
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    source: str = "api"
    # Known before the first attempt to store it, so that a second one finds what the first left.
    id: str = field(default_factory=lambda: new_id("reward-"))
    created_at: float = field(default_factory=time.time)


@dataclass(slots=True, frozen=True)
class RewardList:
    """Rewards that are stored together or not at all."""

    project: str
    rewards: Sequence[NewReward]


@dataclass(slots=True)
class Targets:
    """Those that are there, by project and id."""

    completions: dict[tuple[str, str], str] = field(default_factory=dict)
    """The trajectories of completions."""
    choices: set[tuple[str, int]] = field(default_factory=set)
    """Completion and index, of the completions that a choice is named of."""
    trajectories: dict[tuple[str, str], GroupKey] = field(default_factory=dict)
    """The groups of trajectories, those of the completions among them."""

    def groups(self) -> set[GroupKey]:
        """All groups."""
        return set(self.trajectories.values())

    def know(self, project: str, reward: NewReward) -> bool:
        """Whether the completion or trajectory of a reward is there."""
        known = (project, reward.completion_id) in self.completions
        return known or (project, reward.trajectory_id) in self.trajectories


def targets_of(connection: Connection, lists: Sequence[RewardList]) -> Targets:
    """The targets of lists of rewards."""
    rewards = [reward for each in lists for reward in each.rewards]
    found = Targets()
    for some in _chunks({r.completion_id for r in rewards}):
        query = select(Completion.project, Completion.id, Completion.trajectory_id).where(
            Completion.id.in_(some)
        )
        found.completions.update(((row[0], row[1]), row[2]) for row in connection.execute(query))
    for some in _chunks({r.completion_id for r in rewards if r.choice is not None}):
        choices = select(Choice.completion_id, Choice.index).where(Choice.completion_id.in_(some))
        found.choices.update((row[0], row[1]) for row in connection.execute(choices))
    named = {r.trajectory_id for r in rewards}
    for some in _chunks(named | set(found.completions.values())):
        places = select(
            Trajectory.project, Trajectory.id, Trajectory.policy, Trajectory.group_id
        ).where(Trajectory.project.in_({each.project for each in lists}), Trajectory.id.in_(some))
        found.trajectories.update(
            ((row[0], row[1]), (row[0], row[2], row[3])) for row in connection.execute(places)
        )
    return found


def known_targets(connection: Connection, lists: Sequence[RewardList]) -> list[bool]:
    """For each list whether all of its completions and trajectories are there."""
    targets = targets_of(connection, lists)
    return [all(targets.know(each.project, r) for r in each.rewards) for each in lists]


def _chunks(ids: Iterable[str | None]) -> Iterator[list[str]]:
    named = sorted(id for id in ids if id is not None)
    for start in range(0, len(named), _AT_ONCE):
        yield named[start : start + _AT_ONCE]
