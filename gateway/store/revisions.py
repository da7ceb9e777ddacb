"""Rewards that come, change or are withdrawn after the trainer decided about their trajectory.

Every such change makes a new revision of the trajectory. One that the trainer had decided about
waits again then, and is decided about once more, at that revision; `settled_revision` is the
one that was decided about last. A change while a step runs is not lost either: the trajectory's
revision is then no longer the one that the step read, and it waits on.
"""

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, case, null, or_, select, update

from gateway.store.baselines import learn
from gateway.store.models import CompletionUse, Reward, Step, Trajectory, Version

DECIDED_BY_REWARDS = ("no_reward", "equal_rewards", "too_few", "stale")
"""Reasons that another reward can take away; `stale` because it is then on record anew."""


def reward_changed(
    connection: Connection, project: str, trajectory_id: str, now: float
) -> set[str]:
    """Note that the rewards of a trajectory are others than before, for it and its sub-agents.

    Returns the ids of all of them.
    """
    rewarded = (
        select(Reward.row)
        .where(
            Reward.project == project,
            Reward.trajectory_id == trajectory_id,
            Reward.withdrawn_at.is_(None),
        )
        .exists()
    )
    connection.execute(
        update(Trajectory)
        .where(Trajectory.project == project, Trajectory.id == trajectory_id)
        .values(rewarded=rewarded, **_reopened(now))
    )
    parents = [trajectory_id]
    seen = {trajectory_id}
    while parents:
        # Sub-agents without rewards of their own share those of their parent.
        sharing = (
            Trajectory.project == project,
            Trajectory.parent_id.in_(parents),
            ~Trajectory.rewarded,
        )
        found = connection.execute(select(Trajectory.id).where(*sharing)).scalars()
        parents = [id for id in found if id not in seen]
        seen.update(parents)
        if parents:
            connection.execute(
                update(Trajectory)
                .where(Trajectory.project == project, Trajectory.id.in_(parents))
                .values(**_reopened(now))
            )
    return seen


def _reopened(now: float) -> dict[str, Any]:
    again = or_(Trajectory.state == "used", Trajectory.reason.in_(DECIDED_BY_REWARDS))
    return {
        "revision": Trajectory.revision + 1,
        "updated_at": now,
        "state": case((again, "open"), else_=Trajectory.state),
        "reason": case((again, null()), else_=Trajectory.reason),
    }


def is_news(
    connection: Connection,
    project: str,
    trajectory_id: str,
    target: tuple[str | None, int | None],
    name: str,
    reward: float,
    row: int,
) -> bool:
    """Whether a reward, stored as `row`, differs from the one before it of its name and target."""
    completion_id, choice = target
    before = connection.execute(
        select(Reward.reward)
        .where(
            Reward.project == project,
            Reward.trajectory_id == trajectory_id,
            Reward.completion_id.is_not_distinct_from(completion_id),
            Reward.choice.is_not_distinct_from(choice),
            Reward.name == name,
            Reward.withdrawn_at.is_(None),
            Reward.row < row,
        )
        .order_by(Reward.row.desc())
        .limit(1)
    ).scalar_one_or_none()
    return before is None or float(before) != reward


def taught(
    connection: Connection, project: str, policy: str, head: int, trajectory_ids: Sequence[str]
) -> dict[tuple[str, int], float]:
    """The advantages that `policy@head` has already been trained with, by completion and choice.

    Steps whose versions a rollback left behind do not count: the weights do not hold them.
    """
    if not trajectory_ids:
        return {}
    steps = _lineage(connection, project, policy, head)
    query = select(
        CompletionUse.completion_id,
        CompletionUse.choice,
        CompletionUse.step_id,
        CompletionUse.advantage,
    ).where(
        CompletionUse.trajectory_id.in_(trajectory_ids),
        CompletionUse.reason.is_(None),
        CompletionUse.advantage.is_not(None),
        # Ids of trajectories are a project's own.
        CompletionUse.step_id.in_(select(Step.id).where(Step.project == project)),
    )
    sums: dict[tuple[str, int], float] = {}
    for completion_id, choice, step_id, advantage in connection.execute(query):
        if step_id in steps and advantage is not None:
            key = (completion_id, choice)
            sums[key] = sums.get(key, 0.0) + advantage
    return sums


def _lineage(connection: Connection, project: str, policy: str, head: int) -> set[int]:
    """The steps that made a version and those before it."""
    query = select(Version.number, Version.parent, Version.step_id).where(
        Version.project == project, Version.policy == policy
    )
    versions = {number: (parent, step) for number, parent, step in connection.execute(query)}
    steps: set[int] = set()
    at: int | None = head
    while at is not None and at in versions:
        parent, step = versions.pop(at)
        if step is not None:
            steps.add(step)
        at = parent
    return steps


def settle(
    connection: Connection,
    project: str,
    policy: str,
    step_id: int | None,
    outcomes: Sequence[Any],
) -> None:
    """Record what became of trajectories, as a part of a larger transaction.

    Args:
        outcomes: `training.Outcome`s.
    """
    for outcome in outcomes:
        used = outcome.reason is None
        values: dict[str, Any] = {"reason": outcome.reason}
        decided: Any = "used" if used else "skipped"
        if used:
            values["step_id"] = step_id
        else:
            # What was trained on stays so, even where its newest revision was not.
            decided = case((Trajectory.step_id.is_not(None), "used"), else_="skipped")
        if outcome.revision is not None:
            values["settled_revision"] = outcome.revision
            overtaken = Trajectory.revision != outcome.revision
            decided = case((overtaken, "open"), else_=decided)
            values["reason"] = case((overtaken, null()), else_=outcome.reason)
        connection.execute(
            update(Trajectory)
            .where(Trajectory.project == project, Trajectory.id == outcome.trajectory_id)
            .values(state=decided, **values)
        )
    scores = [(o.task, o.score) for o in outcomes if o.score is not None]
    if scores:
        learn(connection, project, policy, scores, time.time())
