"""Sums over the trajectory database: how a policy's versions did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, func, select

from gateway.store.models import Completion, Policy, Reward, Trajectory


@dataclass(slots=True)
class VersionReward:
    """What the trajectories that began with a version were worth."""

    version: int
    split: str
    trajectories: int
    mean: float
    standard_error: float | None
    """Of the mean; None for fewer than two trajectories."""


@dataclass(slots=True)
class TrajectoryReward:
    """What one trajectory was worth."""

    version: int
    """The one that it began with."""
    split: str
    group_id: str
    reward: float
    created_at: float


def rewards_by_version(connection: Connection, project: str, policy: str) -> list[VersionReward]:
    """Mean reward by version and split, oldest version first.

    A trajectory's reward is the sum of its newest rewards, one for each name and target, weighted
    as the policy's settings say; choices of one completion are alternatives, so their mean counts.
    Trajectories without a reward do not count.
    """
    rows = _newest(project, policy, versions=None, since=0.0).subquery()
    weights = _weights(connection, project, policy)
    worth: ColumnElement[float] = rows.c.reward
    if weights:
        worth = worth * case(weights, value=rows.c.name, else_=1.0)
    alternatives = func.count(rows.c.choice.distinct())
    # Of a completion (or the trajectory itself): what is posted on it as a whole, or its choices.
    targets = (
        select(
            rows.c.version,
            rows.c.split,
            rows.c.id,
            (func.sum(worth) / case((alternatives > 0, alternatives), else_=1)).label("worth"),
        )
        .group_by(rows.c.version, rows.c.split, rows.c.id, rows.c.completion_id)
        .group_by(rows.c.choice.is_(None))
        .subquery()
    )
    each = (
        select(targets.c.version, targets.c.split, func.sum(targets.c.worth).label("worth"))
        .group_by(targets.c.version, targets.c.split, targets.c.id)
        .subquery()
    )
    # Rewards repeat themselves: of a million trajectories few rows are left.
    by = (each.c.version, each.c.split, each.c.worth)
    values: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for version, split, value, count in connection.execute(select(*by, func.count()).group_by(*by)):
        values.setdefault((version, split), []).append((float(value), count))
    return [_summary(*key, values[key]) for key in sorted(values)]


def trajectory_rewards(
    connection: Connection,
    project: str,
    policy: str,
    *,
    versions: Sequence[int] | None = None,
    since: float = 0.0,
) -> list[TrajectoryReward]:
    """What each rewarded trajectory of a policy was worth.

    Args:
        versions: only those that began with one of them.
        since: only those that began at this time or later.
    """
    weights = _weights(connection, project, policy)
    query = _newest(project, policy, versions=versions, since=since)
    found: dict[str, TrajectoryReward] = {}
    choices: dict[tuple[str, str], dict[int, float]] = {}
    for (
        version,
        split,
        trajectory,
        group,
        at,
        completion,
        choice,
        name,
        reward,
    ) in connection.execute(query):
        one = found.get(trajectory)
        if one is None:
            one = found[trajectory] = TrajectoryReward(version, split, group, 0.0, at)
        worth = float(weights.get(name, 1.0) * reward)
        if choice is None:
            one.reward += worth
        else:
            alternatives = choices.setdefault((trajectory, completion), {})
            alternatives[choice] = alternatives.get(choice, 0.0) + worth
    for (trajectory, _), alternatives in choices.items():
        found[trajectory].reward += sum(alternatives.values()) / len(alternatives)
    return list(found.values())


def _weights(connection: Connection, project: str, policy: str) -> dict[str, float]:
    settings = connection.execute(
        select(Policy.settings).where(Policy.project == project, Policy.name == policy)
    ).scalar_one_or_none()
    return dict((settings or {}).get("reward_weights", {}))


def _newest(
    project: str,
    policy: str,
    *,
    versions: Sequence[int] | None,
    since: float,
) -> Select[Any]:
    """The rewards that count, each with its trajectory and the version that this began with."""
    chosen = (
        Trajectory.project == project,
        Trajectory.policy == policy,
        Trajectory.created_at >= since,
        Trajectory.rewarded,
    )
    newest = (
        select(func.max(Reward.row))
        .join(
            Trajectory,
            (Trajectory.project == Reward.project) & (Trajectory.id == Reward.trajectory_id),
        )
        .where(Reward.project == project, Reward.withdrawn_at.is_(None), *chosen)
        .group_by(Reward.trajectory_id, Reward.completion_id, Reward.choice, Reward.name)
    )
    began = (
        select(Completion.trajectory_id, func.min(Completion.version).label("version"))
        .join(
            Trajectory,
            (Trajectory.project == Completion.project)
            & (Trajectory.id == Completion.trajectory_id),
        )
        .where(Completion.project == project, Completion.policy == policy, *chosen)
        .group_by(Completion.trajectory_id)
        .subquery()
    )
    query = (
        select(
            began.c.version,
            Trajectory.split,
            Trajectory.id,
            Trajectory.group_id,
            Trajectory.created_at,
            Reward.completion_id,
            Reward.choice,
            Reward.name,
            Reward.reward,
        )
        .join(
            Trajectory,
            (Trajectory.project == Reward.project) & (Trajectory.id == Reward.trajectory_id),
        )
        .join(began, began.c.trajectory_id == Trajectory.id)
        .where(Reward.row.in_(newest), began.c.version.is_not(None))
    )
    if versions is not None:
        query = query.where(began.c.version.in_(versions))
    return query


def rewarded_since(connection: Connection, project: str, policy: str, since: float) -> int:
    """How many trajectories of a policy that began at a time or later have a reward."""
    query = select(func.count()).where(
        Trajectory.project == project,
        Trajectory.policy == policy,
        Trajectory.created_at >= since,
        Trajectory.rewarded,
    )
    return int(connection.execute(query).scalar_one())


def _summary(version: int, split: str, values: list[tuple[float, int]]) -> VersionReward:
    """Of values with how often each came."""
    count = sum(times for _, times in values)
    mean = sum(value * times for value, times in values) / count
    error = None
    if count > 1:
        variance = sum(times * (value - mean) ** 2 for value, times in values) / (count - 1)
        error = (variance / count) ** 0.5
    return VersionReward(version, split, count, mean, error)
