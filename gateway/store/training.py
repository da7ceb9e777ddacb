"""What the trainer asks of the database: groups under a lease, steps, and new versions.

Every function runs in a transaction of its own. All of them may be called again after a crash.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, case, func, insert, or_, select, update

from gateway.store import queries
from gateway.store.database import Database
from gateway.store.models import (
    CompletionUse,
    Event,
    Group,
    Policy,
    Step,
    Trajectory,
    Version,
)
from gateway.store.records import Json, StoredTrajectory


class Superseded(Exception):
    """A rollback or another trainer moved the policy on while the step ran."""


@dataclass(slots=True)
class TrainablePolicy:
    """A policy as the trainer sees it."""

    project: str
    name: str
    base_model: str
    head: int
    """The version that training goes on from."""
    head_path: str | None
    lora: Json
    settings: Json


@dataclass(slots=True)
class ClaimedGroup:
    """A group that one trainer holds for as long as its lease lasts.

    `trajectories` are those that wait for training, with and without rewards.
    """

    project: str
    policy: str
    id: str
    final: bool
    """Closed, or past its deadline: members that still have no reward are left out for good."""
    trajectories: list[StoredTrajectory]


@dataclass(slots=True)
class Use:
    """What a step made of one choice of a completion."""

    completion_id: str
    choice: int
    trajectory_id: str
    group_id: str
    reward: float | None
    advantage: float | None
    tokens: int
    reason: str | None


@dataclass(slots=True)
class Outcome:
    """What became of a trajectory: `reason` None means that the step trained on it."""

    trajectory_id: str
    reason: str | None


def trainable_policies(database: Database) -> list[TrainablePolicy]:
    """All policies of all projects that are not paused."""
    query = (
        select(Policy, Version.adapter_path)
        .outerjoin(
            Version,
            (Version.project == Policy.project)
            & (Version.policy == Policy.name)
            & (Version.number == Policy.head),
        )
        .where(Policy.state == "active")
        .order_by(Policy.project, Policy.name)
        .with_only_columns(*Policy.__table__.columns, Version.adapter_path)
    )
    with database.read() as connection:
        return [
            TrainablePolicy(
                project=row["project"],
                name=row["name"],
                base_model=row["base_model"],
                head=row["head"],
                head_path=row["adapter_path"],
                lora=row["lora"],
                settings=row["settings"],
            )
            for row in connection.execute(query).mappings()
        ]


def claim_groups(
    database: Database,
    policy: TrainablePolicy,
    worker: str,
    *,
    limit: int,
    group_size: int,
    settle_seconds: float,
    deadline_seconds: float,
    lease_seconds: float,
) -> list[ClaimedGroup]:
    """Take up to `limit` ready groups for `worker`, the longest waiting first.

    A group is ready when `group_size` of its waiting trajectories have a reward, when it was
    closed, or when the first of them has waited `deadline_seconds`; and when nothing was added to
    it for `settle_seconds`, so that no episode is taken in its middle. Held groups come back to
    everybody when their lease runs out.
    """
    now = time.time()
    waiting = func.count()
    rewarded = func.sum(case((Trajectory.rewarded, 1), else_=0))
    ready = (
        select(Group.id)
        .join(
            Trajectory,
            (Trajectory.project == Group.project)
            & (Trajectory.policy == Group.policy)
            & (Trajectory.group_id == Group.id),
        )
        .where(
            Group.project == policy.project,
            Group.policy == policy.name,
            or_(Group.lease_owner.is_(None), Group.lease_expires < now),
            Trajectory.state == "open",
            Trajectory.split == "train",
        )
        .group_by(Group.id, Group.closed_at)
        .having(
            func.max(Trajectory.updated_at) <= now - settle_seconds,
            or_(
                rewarded >= group_size,
                Group.closed_at.is_not(None),
                (func.min(Trajectory.created_at) <= now - deadline_seconds) & (rewarded > 0),
            ),
            waiting > 0,
        )
        .order_by(func.min(Trajectory.created_at))
        .limit(limit)
    )
    with database.write() as connection:
        ids = list(connection.execute(ready).scalars())
        taken = [id for id in ids if _lease(connection, policy, id, worker, now, lease_seconds)]
    return [_claimed(database, policy, id, now - deadline_seconds) for id in taken]


def _lease(
    connection: Connection,
    policy: TrainablePolicy,
    group_id: str,
    worker: str,
    now: float,
    seconds: float,
) -> bool:
    # Conditional once more: on PostgreSQL another worker may have been faster.
    result = connection.execute(
        update(Group)
        .where(
            Group.project == policy.project,
            Group.policy == policy.name,
            Group.id == group_id,
            or_(Group.lease_owner.is_(None), Group.lease_expires < now),
        )
        .values(lease_owner=worker, lease_expires=now + seconds)
    )
    return result.rowcount == 1


def _claimed(
    database: Database, policy: TrainablePolicy, group_id: str, expired_before: float
) -> ClaimedGroup:
    with database.read() as connection:
        closed_at = connection.execute(
            select(Group.closed_at).where(
                Group.project == policy.project,
                Group.policy == policy.name,
                Group.id == group_id,
            )
        ).scalar_one()
        ids = list(
            connection.execute(
                select(Trajectory.id).where(
                    Trajectory.project == policy.project,
                    Trajectory.policy == policy.name,
                    Trajectory.group_id == group_id,
                    Trajectory.state == "open",
                    Trajectory.split == "train",
                )
            ).scalars()
        )
        found = queries.trajectories(connection, policy.project, ids)
        return ClaimedGroup(
            project=policy.project,
            policy=policy.name,
            id=group_id,
            final=closed_at is not None or any(t.created_at <= expired_before for t in found),
            trajectories=found,
        )


def renew_leases(
    database: Database, groups: Sequence[ClaimedGroup], worker: str, lease_seconds: float
) -> int:
    """Hold claimed groups for longer; returns how many of them `worker` still held."""
    with database.write() as connection:
        return sum(
            connection.execute(
                update(Group)
                .where(*_held(group, worker))
                .values(lease_expires=time.time() + lease_seconds)
            ).rowcount
            for group in groups
        )


def release_groups(database: Database, groups: Sequence[ClaimedGroup], worker: str) -> None:
    """Give claimed groups back untouched."""
    with database.write() as connection:
        _release(connection, groups, worker)


def _held(group: ClaimedGroup, worker: str) -> tuple[Any, ...]:
    return (
        Group.project == group.project,
        Group.policy == group.policy,
        Group.id == group.id,
        Group.lease_owner == worker,
    )


def _release(connection: Connection, groups: Sequence[ClaimedGroup], worker: str) -> None:
    for group in groups:
        connection.execute(
            update(Group).where(*_held(group, worker)).values(lease_owner=None, lease_expires=None)
        )


def skip_groups(
    database: Database,
    groups: Sequence[ClaimedGroup],
    worker: str,
    outcomes: Sequence[Outcome],
    uses: Sequence[Use],
) -> None:
    """Record that claimed groups had nothing to teach, each trajectory with its reason."""
    with database.write() as connection:
        _settle(connection, groups[0].project, None, outcomes, uses)
        _release(connection, groups, worker)


def begin_step(database: Database, policy: TrainablePolicy, worker: str, config: Json) -> int:
    """Record that a step began; returns its id."""
    with database.write() as connection:
        return int(
            connection.execute(
                insert(Step)
                .values(
                    project=policy.project,
                    policy=policy.name,
                    parent_version=policy.head,
                    version=None,
                    state="running",
                    worker=worker,
                    config=config,
                    metrics=None,
                    error=None,
                    started_at=time.time(),
                    finished_at=None,
                )
                .returning(Step.id)
            ).scalar_one()
        )


def next_version(database: Database, policy: TrainablePolicy) -> int:
    """The number that the next version of a policy gets: one that no version ever had."""
    with database.read() as connection:
        newest = connection.execute(
            select(func.max(Version.number)).where(
                Version.project == policy.project, Version.policy == policy.name
            )
        ).scalar_one()
    return int(newest or 0) + 1


def finish_step(
    database: Database,
    policy: TrainablePolicy,
    step_id: int,
    worker: str,
    *,
    number: int,
    adapter_path: Path,
    probe: Json,
    metrics: Json,
    groups: Sequence[ClaimedGroup],
    outcomes: Sequence[Outcome],
    uses: Sequence[Use],
) -> None:
    """Record a finished step and its version, all or nothing.

    Raises:
        Superseded: the policy's head is no longer the version that the step began from, or a
            lease was lost. The step is marked so; its groups wait again.
    """
    try:
        with database.write() as connection:
            _hold_all(connection, policy, groups, worker, number)
            now = time.time()
            connection.execute(
                insert(Version).values(
                    project=policy.project,
                    policy=policy.name,
                    number=number,
                    parent=policy.head,
                    state="ready",
                    adapter_path=str(adapter_path),
                    probe=probe,
                    probe_result=None,
                    step_id=step_id,
                    created_at=now,
                    published_at=None,
                )
            )
            connection.execute(
                update(Step)
                .where(Step.id == step_id)
                .values(state="done", version=number, metrics=metrics, finished_at=now)
            )
            _settle(connection, policy.project, step_id, outcomes, uses)
            _release(connection, groups, worker)
    except Superseded as lost:
        fail_step(database, policy, step_id, worker, groups, str(lost), "superseded")
        raise


def _hold_all(
    connection: Connection,
    policy: TrainablePolicy,
    groups: Sequence[ClaimedGroup],
    worker: str,
    number: int,
) -> None:
    moved = connection.execute(
        update(Policy)
        .where(
            Policy.project == policy.project,
            Policy.name == policy.name,
            Policy.head == policy.head,
        )
        .values(head=number)
    ).rowcount
    if not moved:
        raise Superseded(f"{policy.name} was moved away from @{policy.head} while the step ran")
    for group in groups:
        held = select(Group.id).where(*_held(group, worker)).with_for_update()
        if connection.execute(held).first() is None:
            raise Superseded(f"the lease on group {group.id} ran out while the step ran")


def fail_step(
    database: Database,
    policy: TrainablePolicy,
    step_id: int,
    worker: str,
    groups: Sequence[ClaimedGroup],
    error: str,
    state: str = "failed",
) -> None:
    """Record that a step came to nothing, and give its groups back."""
    with database.write() as connection:
        now = time.time()
        connection.execute(
            update(Step).where(Step.id == step_id).values(state=state, error=error, finished_at=now)
        )
        connection.execute(
            insert(Event).values(
                project=policy.project,
                policy=policy.name,
                kind=f"step_{state}",
                version=None,
                detail={"step": step_id, "error": error},
                at=now,
            )
        )
        _release(connection, groups, worker)


def _settle(
    connection: Connection,
    project: str,
    step_id: int | None,
    outcomes: Sequence[Outcome],
    uses: Sequence[Use],
) -> None:
    for outcome in outcomes:
        used = outcome.reason is None
        connection.execute(
            update(Trajectory)
            .where(Trajectory.project == project, Trajectory.id == outcome.trajectory_id)
            .values(
                state="used" if used else "skipped",
                reason=outcome.reason,
                step_id=step_id if used else None,
            )
        )
    if uses:
        connection.execute(
            insert(CompletionUse),
            [
                {
                    "step_id": step_id,
                    "completion_id": use.completion_id,
                    "choice": use.choice,
                    "trajectory_id": use.trajectory_id,
                    "group_id": use.group_id,
                    "reward": use.reward,
                    "advantage": use.advantage,
                    "tokens": use.tokens,
                    "reason": use.reason,
                }
                for use in uses
            ],
        )
