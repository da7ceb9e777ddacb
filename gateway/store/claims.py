"""Which groups are ready for training, and the leases under which trainers hold them.

Every function runs in a transaction of its own, but for those that take a connection.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, RowMapping, select, update

from gateway.store import claim_statements as statements
from gateway.store import policy_leases, queries, relatives, waiting
from gateway.store.database import Database
from gateway.store.models import Group, Policy, Version
from gateway.store.readiness import Readiness
from gateway.store.records import Json, StoredTrajectory
from gateway.store.relatives import Relatives

_SPARE = 16
"""Groups that are looked at beyond those that are wanted: some turn out not to be ready."""


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

    `trajectories` are those that wait for training: the rewarded ones, and the others too if the
    group is final.
    """

    project: str
    policy: str
    id: str
    final: bool
    """Closed, or past its deadline: members that still have no reward are left out for good."""
    trajectories: list[StoredTrajectory]
    task: str | None = None
    relatives: Relatives = field(default_factory=Relatives)
    by_choice: bool = False
    """The choices of one completion are compared with each other, and with nothing else."""


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
    at_least: int = 1,
    exclusive: bool = False,
) -> list[ClaimedGroup]:
    """Take up to `limit` ready groups for `worker`, the longest waiting first.

    A group is ready when `group_size` of its waiting members have a reward, when all choices have
    one in a group of the choices of one completion, when it was closed, or when the first of its
    trajectories has waited `deadline_seconds`; and when nothing was added to its rewarded
    trajectories for `settle_seconds`, so that no episode is taken in its middle; or when rewards of
    members that were decided about before have changed. Held groups come back to everybody when
    their lease runs out.

    Fewer than `at_least` are taken only if one of them gets no more rewards: the others can wait,
    and until then nothing of them is read.

    Args:
        exclusive: with the groups, take the lease on the policy: all or nothing.
    """
    now = time.time()
    rule = _Rule(
        Readiness(group_size, now - deadline_seconds), now - settle_seconds, now, limit, at_least
    )
    with database.read() as connection:
        ids, revised = _candidates(connection, policy, rule)
        if not ids:
            return []
        # A lease that a crash forgets is one that ran out: its step will not be accepted.
        with database.write_on(connection, durable=False):
            if exclusive:
                if not policy_leases.take(connection, policy, worker, now, lease_seconds):
                    return []
                ids, revised = _candidates(connection, policy, rule)
            taken = _take(connection, policy, ids, revised, worker, rule, now + lease_seconds)
        found = [_claimed(connection, policy, group) for group in taken]
    claimed = [group for group in found if group.trajectories]
    if len(claimed) < len(found):
        release_groups(database, [group for group in found if not group.trajectories], worker)
    if exclusive and not claimed:
        policy_leases.release(database, policy, worker)
    return claimed


@dataclass(frozen=True, slots=True)
class _Rule:
    """When a group is ready; times are Unix seconds."""

    ready: Readiness
    settled_before: float
    now: float
    limit: int
    at_least: int

    def holds(self, group: RowMapping) -> bool:
        """Whether a group, whose numbers are right, is ready but for settling."""
        numbers = (group["waiting"], group["choices"], group["closed_at"], group["oldest_at"])
        return self.ready.holds(*numbers)

    def final(self, group: RowMapping) -> bool:
        """Whether it gets no more rewards, or need not wait for them."""
        return self.ready.final(group["waiting"], group["closed_at"], group["oldest_at"])


def _candidates(
    connection: Connection, policy: TrainablePolicy, rule: _Rule
) -> tuple[list[str], dict[str, float]]:
    """Groups that look ready, best first, none if they are too few for a step; and, of those in
    which rewards changed, since when.

    Their rows may say too much, never too little.
    """
    ready = {
        "of_project": policy.project,
        "of_policy": policy.name,
        "now": rule.now,
        "size": rule.ready.size,
        "began_before": rule.ready.began_before,
        "most": 4 * rule.limit + _SPARE,
    }
    found: dict[str, RowMapping] = {
        row["id"]: row
        for row in connection.execute(statements.READY, ready).mappings().all()
        if row["newest"] is None or row["newest"] <= rule.settled_before
    }
    revised = waiting.revised(
        connection,
        policy.project,
        policy.name,
        settled_before=rule.settled_before,
        limit=rule.limit,
    )
    ids = sorted(found, key=lambda id: (found[id]["strikes"], found[id]["oldest_at"]))
    ids += [id for id in revised if id not in found]
    urgent = [
        *map(rule.final, found.values()),
        *(at <= rule.ready.began_before for at in revised.values()),
    ]
    return (ids if len(ids) >= rule.at_least or any(urgent) else []), revised


@dataclass(frozen=True, slots=True)
class _Taken:
    row: RowMapping
    fresh: bool
    """Its members that were not decided about before are enough."""
    final: bool


def _take(
    connection: Connection,
    policy: TrainablePolicy,
    ids: Sequence[str],
    revised: Mapping[str, float],
    worker: str,
    rule: _Rule,
    expires: float,
) -> list[_Taken]:
    """Lease groups, having counted what is in them."""
    taken: list[_Taken] = []
    of = {"of_project": policy.project, "of_policy": policy.name}
    for id in ids:
        one = {**of, "now": rule.now, "id": id}
        # On PostgreSQL another worker may have been faster. A group that is being written to can
        # be had the next time; waiting for it while others are held would be a risk of deadlock.
        if connection.execute(statements.LOCK, one).first() is None:
            continue
        waiting.count(connection, [(policy.project, policy.name, id)])
        group = connection.execute(statements.ONE, one).mappings().one()
        fresh = rule.holds(group)
        if fresh or id in revised:
            # A correction to a closed group does not hurry: it may wait for other groups.
            overdue = id in revised and revised[id] <= rule.ready.began_before
            taken.append(_Taken(group, fresh, (fresh and rule.final(group)) or overdue))
        if len(taken) == rule.limit:
            break
    if len(taken) < rule.at_least and not any(group.final for group in taken):
        return []
    connection.execute(
        statements.LEASE,
        {
            **of,
            "ids": [group.row["id"] for group in taken],
            "worker": worker,
            "until": expires,
        },
    )
    return taken


def _claimed(connection: Connection, policy: TrainablePolicy, group: _Taken) -> ClaimedGroup:
    row, final = group.row, group.final
    # Where it is not fresh, only what was decided about before: the others are not enough yet.
    members = connection.execute(
        statements.members(group.fresh, final),
        {"of_project": policy.project, "of_policy": policy.name, "id": row["id"]},
    )
    rows = sorted(members.mappings().all(), key=lambda row: (row["created_at"], row["id"]))
    found = queries.whole(connection, policy.project, rows)
    late = final or any(t.settled_revision is not None for t in found)
    return ClaimedGroup(
        project=policy.project,
        policy=policy.name,
        id=row["id"],
        final=final,
        trajectories=found,
        task=row["task"],
        relatives=relatives.find(
            connection,
            policy.project,
            policy.name,
            policy.head,
            found,
            task=row["task"],
            with_peers=late and bool(found),
        ),
        by_choice=row["choices"] is not None,
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
    waiting.count(connection, [(group.project, group.policy, group.id) for group in groups])
