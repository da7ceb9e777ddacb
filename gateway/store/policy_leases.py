"""The lease on a policy: one trainer at a time takes its steps."""

import time

from sqlalchemy import or_, update

from gateway.store.claims import TrainablePolicy
from gateway.store.database import Database
from gateway.store.models import Policy


def hold(database: Database, policy: TrainablePolicy, worker: str, seconds: float) -> bool:
    """Take the lease on a policy that nobody else holds, or hold it for longer."""
    now = time.time()
    with database.write() as connection:
        return bool(
            connection.execute(
                update(Policy)
                .where(
                    Policy.project == policy.project,
                    Policy.name == policy.name,
                    or_(
                        Policy.lease_owner.is_(None),
                        Policy.lease_owner == worker,
                        Policy.lease_expires < now,
                    ),
                )
                .values(lease_owner=worker, lease_expires=now + seconds)
            ).rowcount
        )


def release(database: Database, policy: TrainablePolicy, worker: str) -> None:
    """Give the lease back."""
    with database.write() as connection:
        connection.execute(
            update(Policy)
            .where(
                Policy.project == policy.project,
                Policy.name == policy.name,
                Policy.lease_owner == worker,
            )
            .values(lease_owner=None, lease_expires=None)
        )
