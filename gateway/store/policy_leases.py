"""The lease on a policy: one trainer at a time takes its steps."""

import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, or_, select, update

from gateway.store.database import Database
from gateway.store.models import Group, Policy

if TYPE_CHECKING:
    from gateway.store.claims import TrainablePolicy


def take(
    connection: Connection, policy: "TrainablePolicy", worker: str, now: float, seconds: float
) -> bool:
    """Take the lease, as a part of a larger transaction; with it, all that a dead trainer held.

    False if another trainer holds it, or the policy has moved on since it was read.
    """
    query = select(Policy.lease_owner).where(*_policy(policy)).with_for_update()
    before = connection.execute(query).scalar_one_or_none()
    taken = connection.execute(
        update(Policy)
        .where(*_policy(policy), _free_for(worker, now), Policy.head == policy.head)
        .values(lease_owner=worker, lease_expires=now + seconds)
    ).rowcount
    if taken and before not in (None, worker):
        # Its groups come back now, and not a moment after others were taken: the order of steps
        # is the same as if it had never lived.
        connection.execute(
            update(Group)
            .where(
                Group.project == policy.project,
                Group.policy == policy.name,
                Group.lease_owner == before,
            )
            .values(lease_owner=None, lease_expires=None)
        )
    return bool(taken)


def hold(database: Database, policy: "TrainablePolicy", worker: str, seconds: float) -> bool:
    """Hold the lease for longer; False if somebody else has it by now."""
    now = time.time()
    with database.write() as connection:
        return bool(
            connection.execute(
                update(Policy)
                .where(*_policy(policy), _free_for(worker, now))
                .values(lease_owner=worker, lease_expires=now + seconds)
            ).rowcount
        )


def release(database: Database, policy: "TrainablePolicy", worker: str) -> None:
    """Give the lease back."""
    with database.write() as connection:
        connection.execute(
            update(Policy)
            .where(*_policy(policy), Policy.lease_owner == worker)
            .values(lease_owner=None, lease_expires=None)
        )


def _policy(policy: "TrainablePolicy") -> tuple[Any, ...]:
    return Policy.project == policy.project, Policy.name == policy.name


def _free_for(worker: str, now: float) -> Any:
    return or_(
        Policy.lease_owner.is_(None), Policy.lease_owner == worker, Policy.lease_expires < now
    )
