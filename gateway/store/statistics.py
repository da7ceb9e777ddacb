"""Sums over the trajectory database: how a policy's versions did."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

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
    scores: dict[tuple[int, str], list[float]] = {}
    for one in trajectory_rewards(connection, project, policy):
        scores.setdefault((one.version, one.split), []).append(one.reward)
    return [_summary(*key, scores[key]) for key in sorted(scores)]


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
    settings = connection.execute(
        select(Policy.settings).where(Policy.project == project, Policy.name == policy)
    ).scalar_one_or_none()
    weights: dict[str, float] = (settings or {}).get("reward_weights", {})
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


def rewarded_since(connection: Connection, project: str, policy: str, since: float) -> int:
    """How many trajectories of a policy that began at a time or later have a reward."""
    query = select(func.count()).where(
        Trajectory.project == project,
        Trajectory.policy == policy,
        Trajectory.created_at >= since,
        Trajectory.rewarded,
    )
    return int(connection.execute(query).scalar_one())


def _summary(version: int, split: str, values: list[float]) -> VersionReward:
    count = len(values)
    mean = sum(values) / count
    error = None
    if count > 1:
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        error = (variance / count) ** 0.5
    return VersionReward(version, split, count, mean, error)
