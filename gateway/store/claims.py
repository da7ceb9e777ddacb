"""Which groups are ready for training, and the leases under which trainers hold them.

Every function runs in a transaction of its own, but for those that take a connection.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, RowMapping, case, func, or_, select, update

from gateway.store import policy_leases, queries, relatives
from gateway.store.database import Database
from gateway.store.models import Group, Policy, Trajectory, Version
from gateway.store.records import Json, StoredTrajectory
from gateway.store.relatives import Relatives, has_reward, stands_alone


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
    rate_factor: float = 1.0
    """What the settings' learning rate is multiplied with."""
    forked: bool = False
    """Whether its version 0 is a version of another policy, and not the base model."""
    base_digest: str | None = None
    held_by: str | None = None
    """The trainer that takes a step of it now."""
    reference_path: str | None = None
    """Adapter of its `kl_version`; None where the KL term keeps near the base model."""


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
    task: str | None = None
    relatives: Relatives = field(default_factory=Relatives)


def trainable_policies(database: Database) -> list[TrainablePolicy]:
    """All policies of all projects that are not paused, and have no version on trial."""
    query = (
        select(Policy, Version.adapter_path)
        .outerjoin(
            Version,
            (Version.project == Policy.project)
            & (Version.policy == Policy.name)
            & (Version.number == Policy.head),
        )
        .where(Policy.state == "active", Policy.canary.is_(None))
        .order_by(Policy.project, Policy.name)
        .with_only_columns(
            *Policy.__table__.columns, Version.adapter_path, Version.state.label("head_state")
        )
    )
    now = time.time()
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
                rate_factor=row["rate_factor"],
                forked=row["forked_from"] is not None,
                base_digest=row["base_digest"],
                held_by=row["lease_owner"] if (row["lease_expires"] or 0) > now else None,
                reference_path=_reference(connection, row),
            )
            for row in connection.execute(query).mappings()
            if not _waits_for_trial(row)
        ]


def _reference(connection: Connection, row: RowMapping) -> str | None:
    number = row["settings"].get("kl_version")
    if number is None or (number == 0 and row["forked_from"] is None):
        return None
    found = queries.version(connection, row["project"], row["name"], number)
    path = found["adapter_path"] if found is not None else None
    return path or f"{row['name']}@{number}, its kl_version, which there is not,"


def _waits_for_trial(row: RowMapping) -> bool:
    # Nothing grows from a version that is still to be tried.
    share = row["settings"].get("canary", {}).get("share", 0.0)
    return bool(share) and row["head_state"] == "ready"


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
    exclusive: bool = False,
) -> list[ClaimedGroup]:
    """Take up to `limit` ready groups for `worker`, the longest waiting first.

    A group is ready when `group_size` of its waiting trajectories have a reward, when it was
    closed, or when the first of them has waited `deadline_seconds`; and when nothing was added to
    it for `settle_seconds`, so that no episode is taken in its middle; or when rewards of members
    that were decided about before have changed. Held groups come back to everybody when their lease
    runs out.

    Args:
        exclusive: with the groups, take the lease on the policy: all or nothing.
    """
    now = time.time()
    waiting = func.count()
    rewarded = func.sum(case((has_reward, 1), else_=0))
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
            Trajectory.settled_revision.is_(None),
            stands_alone,
        )
        .group_by(Group.id, Group.closed_at, Group.strikes)
        .having(
            func.max(Trajectory.updated_at) <= now - settle_seconds,
            or_(
                rewarded >= group_size,
                Group.closed_at.is_not(None),
                (func.min(Trajectory.created_at) <= now - deadline_seconds) & (rewarded > 0),
            ),
            waiting > 0,
        )
        # Those with which steps had to be undone come last.
        .order_by(Group.strikes, func.min(Trajectory.created_at))
        .limit(limit)
    )

    def find(connection: Connection) -> tuple[list[str], set[str]]:
        ids = list(connection.execute(ready).scalars())
        fresh = set(ids)
        revised = relatives.revised_groups(
            connection,
            policy.project,
            policy.name,
            settled_before=now - settle_seconds,
            limit=limit,
        )
        return [*ids, *(id for id in revised if id not in fresh)][:limit], fresh

    with database.write() as connection:
        ids, fresh = find(connection)
        if exclusive and ids:
            if not policy_leases.take(connection, policy, worker, now, lease_seconds):
                return []
            ids, fresh = find(connection)
        taken = [id for id in ids if _lease(connection, policy, id, worker, now, lease_seconds)]
    found = [_claimed(database, policy, id, id in fresh, now - deadline_seconds) for id in taken]
    claimed = [group for group in found if group.trajectories]
    if len(claimed) < len(found):
        release_groups(database, [group for group in found if not group.trajectories], worker)
    if exclusive and ids and not claimed:
        policy_leases.release(database, policy, worker)
    return claimed


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
    database: Database,
    policy: TrainablePolicy,
    group_id: str,
    fresh: bool,
    expired_before: float,
) -> ClaimedGroup:
    with database.read() as connection:
        closed_at, task = connection.execute(
            select(Group.closed_at, Group.task).where(
                Group.project == policy.project,
                Group.policy == policy.name,
                Group.id == group_id,
            )
        ).one()
        members = select(Trajectory.id).where(
            Trajectory.project == policy.project,
            Trajectory.policy == policy.name,
            Trajectory.group_id == group_id,
            Trajectory.state == "open",
            Trajectory.split == "train",
            stands_alone,
        )
        if not fresh:
            # Only what was decided about before: the others are not enough yet.
            members = members.where(Trajectory.settled_revision.is_not(None))
        ids = list(connection.execute(members).scalars())
        found = queries.trajectories(connection, policy.project, ids)
        # A correction to a closed group does not hurry: it may wait for other groups.
        final = (fresh and closed_at is not None) or any(
            (t.created_at if t.settled_revision is None else t.updated_at) <= expired_before
            for t in found
        )
        late = final or any(t.settled_revision is not None for t in found)
        return ClaimedGroup(
            project=policy.project,
            policy=policy.name,
            id=group_id,
            final=final,
            trajectories=found,
            task=task,
            relatives=relatives.find(
                connection,
                policy.project,
                policy.name,
                policy.head,
                found,
                task=task,
                with_peers=late and bool(found),
            ),
        )


def renew_leases(
    database: Database, groups: Sequence[ClaimedGroup], worker: str, lease_seconds: float
) -> int:
    """Hold claimed groups for longer; returns how many of them `worker` still held."""
    with database.write() as connection:
        return sum(
            connection.execute(
                update(Group)
                .where(*held_by(group, worker))
                .values(lease_expires=time.time() + lease_seconds)
            ).rowcount
            for group in groups
        )


def release_groups(database: Database, groups: Sequence[ClaimedGroup], worker: str) -> None:
    """Give claimed groups back untouched."""
    with database.write() as connection:
        release(connection, groups, worker)


def held_by(group: ClaimedGroup, worker: str) -> tuple[Any, ...]:
    """The conditions under which a worker still holds a group."""
    return (
        Group.project == group.project,
        Group.policy == group.policy,
        Group.id == group.id,
        Group.lease_owner == worker,
    )


def release(connection: Connection, groups: Sequence[ClaimedGroup], worker: str) -> None:
    """Give claimed groups back, as a part of a larger transaction."""
    for group in groups:
        connection.execute(
            update(Group)
            .where(*held_by(group, worker))
            .values(lease_owner=None, lease_expires=None)
        )
