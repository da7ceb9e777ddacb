"""Sums over the trajectory database: how a policy's versions did."""

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


def rewards_by_version(connection: Connection, project: str, policy: str) -> list[VersionReward]:
    """Mean reward by version and split, oldest version first.

    A trajectory's reward is the sum of its newest rewards, one for each name and target, weighted
    as the policy's settings say. Trajectories without a reward do not count.
    """
    settings = connection.execute(
        select(Policy.settings).where(Policy.project == project, Policy.name == policy)
    ).scalar_one_or_none()
    weights: dict[str, float] = (settings or {}).get("reward_weights", {})
    newest = (
        select(func.max(Reward.row))
        .join(
            Trajectory,
            (Trajectory.project == Reward.project) & (Trajectory.id == Reward.trajectory_id),
        )
        .where(
            Reward.project == project,
            Reward.withdrawn_at.is_(None),
            Trajectory.policy == policy,
        )
        .group_by(Reward.trajectory_id, Reward.completion_id, Reward.choice, Reward.name)
    )
    began = (
        select(Completion.trajectory_id, func.min(Completion.version).label("version"))
        .where(Completion.project == project, Completion.policy == policy)
        .group_by(Completion.trajectory_id)
        .subquery()
    )
    query = (
        select(began.c.version, Trajectory.split, Trajectory.id, Reward.name, Reward.reward)
        .join(
            Trajectory,
            (Trajectory.project == Reward.project) & (Trajectory.id == Reward.trajectory_id),
        )
        .join(began, began.c.trajectory_id == Trajectory.id)
        .where(Reward.row.in_(newest), began.c.version.is_not(None))
    )
    scores: dict[tuple[int, str], dict[str, float]] = {}
    for version, split, trajectory, name, reward in connection.execute(query):
        members = scores.setdefault((version, split), {})
        members[trajectory] = members.get(trajectory, 0.0) + weights.get(name, 1.0) * reward
    return [_summary(*key, list(scores[key].values())) for key in sorted(scores)]


def _summary(version: int, split: str, values: list[float]) -> VersionReward:
    count = len(values)
    mean = sum(values) / count
    error = None
    if count > 1:
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        error = (variance / count) ** 0.5
    return VersionReward(version, split, count, mean, error)
