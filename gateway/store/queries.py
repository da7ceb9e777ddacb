"""Reading the trajectory database."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, func, select
from sqlalchemy import case as sql_case

from gateway.store.models import Choice, Completion, Group, Policy, Reward, Trajectory, Version
from gateway.store.reading import stored_completions
from gateway.store.records import (
    StoredCompletion,
    StoredReward,
    StoredTrajectory,
    Tail,
)


@dataclass(slots=True)
class GroupSummary:
    """A group with the numbers of its trajectories."""

    id: str
    policy: str
    task: str | None
    state: str
    """`open`, `claimed` (a trainer has it), `trained` (nothing waits any more), or `held_out` (all
    is `split=eval`); `readiness.with_states` tells `ready` and `skipped` (all was left out) too."""
    trajectories: int
    rewarded: int
    used: int
    skipped: int
    reasons: dict[str, int]
    created_at: float
    updated_at: float
    closed_at: float | None
    waiting: int
    """Rewarded members that are not trained on yet: trajectories, or choices."""
    choices: int | None
    """How many choices are compared, in a group of the choices of one completion."""
    oldest_at: float | None
    """When the oldest that waits, rewarded or not, began; None where none does."""


Row = dict[str, Any]


def policies(connection: Connection, project: str) -> list[Row]:
    """All policies of a project, by name."""
    query = select(Policy.__table__).where(Policy.project == project).order_by(Policy.name)
    return [dict(row) for row in connection.execute(query).mappings()]


def all_policies(connection: Connection) -> list[Row]:
    """The policies of all projects, by project and name."""
    query = select(Policy.__table__).order_by(Policy.project, Policy.name)
    return [dict(row) for row in connection.execute(query).mappings()]


def policy(connection: Connection, project: str, name: str) -> Row | None:
    """One policy."""
    query = select(Policy.__table__).where(Policy.project == project, Policy.name == name)
    found = connection.execute(query).mappings().one_or_none()
    return dict(found) if found is not None else None


def versions(connection: Connection, project: str, name: str) -> list[Row]:
    """The versions of a policy, oldest first."""
    query = (
        select(Version.__table__)
        .where(Version.project == project, Version.policy == name)
        .order_by(Version.number)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def ready_versions(connection: Connection) -> set[tuple[str, str, int]]:
    """Project, policy and number of all versions that wait to be published."""
    query = select(Version.project, Version.policy, Version.number).where(Version.state == "ready")
    return {(row.project, row.policy, row.number) for row in connection.execute(query)}


def version(connection: Connection, project: str, name: str, number: int) -> Row | None:
    """One version of a policy."""
    query = select(Version.__table__).where(
        Version.project == project, Version.policy == name, Version.number == number
    )
    found = connection.execute(query).mappings().one_or_none()
    return dict(found) if found is not None else None


def find_tail(
    connection: Connection, project: str, keys: Sequence[bytes], trajectory_id: str | None
) -> Tail | None:
    """The thread that a request continues.

    Args:
        keys: digests of the request's beginnings, the longest first.
        trajectory_id: only look within this trajectory.

    Of several threads that end alike, one that nothing continues yet comes first, then the newest.
    """
    if not keys:
        return None
    order = sql_case({key: rank for rank, key in enumerate(keys)}, value=Choice.thread_key)
    query = (
        select(Completion, Choice)
        .join(Choice, Choice.completion_id == Completion.id)
        .where(Choice.thread_key.in_(keys), Completion.project == project)
        .order_by(order, Choice.continued, Completion.created_at.desc())
        .limit(1)
    )
    columns = query.with_only_columns(
        Completion.id,
        Completion.trajectory_id,
        Completion.messages_count,
        Completion.messages_digest,
        Completion.request_digest,
        Completion.prompt_tokens,
        Completion.prompt_digest,
        Choice.index,
        Choice.token_ids,
        Choice.sequence_digest,
    )
    if trajectory_id is not None:
        columns = columns.where(Completion.trajectory_id == trajectory_id)
    row = connection.execute(columns).mappings().first()
    if row is None:
        return None
    prompt = row["prompt_tokens"] if row["prompt_digest"] is not None else 0
    answer = row["token_ids"]
    return Tail(
        completion_id=row["id"],
        choice=row["index"],
        trajectory_id=row["trajectory_id"],
        messages_count=row["messages_count"],
        messages_digest=row["messages_digest"],
        request_digest=row["request_digest"],
        prompt_length=prompt,
        prompt_digest=row["prompt_digest"],
        sequence_length=prompt + (len(answer) - 1) // answer[0]
        if row["sequence_digest"] is not None
        else 0,
        sequence_digest=row["sequence_digest"],
    )


def trajectory_place(
    connection: Connection, project: str, trajectory_id: str, policy_name: str
) -> tuple[str, str, str | None, int | None] | None:
    """Group, split and parent of a trajectory, and the first version `policy_name` served it."""
    row = connection.execute(
        select(Trajectory.group_id, Trajectory.split, Trajectory.parent_id).where(
            Trajectory.project == project, Trajectory.id == trajectory_id
        )
    ).one_or_none()
    if row is None:
        return None
    first = connection.execute(
        select(Completion.version)
        .where(
            Completion.project == project,
            Completion.trajectory_id == trajectory_id,
            Completion.policy == policy_name,
        )
        .order_by(Completion.created_at)
        .limit(1)
    ).scalar_one_or_none()
    return row.group_id, row.split, row.parent_id, first


def completion(connection: Connection, project: str, completion_id: str) -> StoredCompletion | None:
    """One completion, whole."""
    trajectory_id = connection.execute(
        select(Completion.trajectory_id).where(
            Completion.project == project, Completion.id == completion_id
        )
    ).scalar_one_or_none()
    if trajectory_id is None:
        return None
    found = stored_completions(connection, project, [trajectory_id])
    return next(item for item in found if item.id == completion_id)


def trajectory(connection: Connection, project: str, trajectory_id: str) -> StoredTrajectory | None:
    """One trajectory with its completions and rewards."""
    found = trajectories(connection, project, [trajectory_id])
    return found[0] if found else None


_FIELDS = (
    *("project", "id", "policy", "group_id", "parent_id", "split", "attribution", "state"),
    *("reason", "step_id", "created_at", "updated_at", "revision", "settled_revision"),
)
# Built once: a trainer that claims a group reads many trajectories one after the other.
_TRAJECTORIES = (
    select(Trajectory.__table__)
    .where(
        Trajectory.project == bindparam("of_project"),
        Trajectory.id.in_(bindparam("ids", expanding=True)),
    )
    .order_by(Trajectory.created_at, Trajectory.id)
)


def trajectories(
    connection: Connection, project: str, ids: Sequence[str]
) -> list[StoredTrajectory]:
    """Trajectories, whole, in the order in which they began."""
    values = {"of_project": project, "ids": list(ids)}
    return whole(connection, project, connection.execute(_TRAJECTORIES, values).mappings().all())


def whole(
    connection: Connection, project: str, rows: Sequence[RowMapping]
) -> list[StoredTrajectory]:
    """Trajectories whose rows are there already, with their completions and rewards."""
    ids = [row["id"] for row in rows]
    completions: dict[str, list[StoredCompletion]] = {}
    for item in stored_completions(connection, project, ids):
        completions.setdefault(item.trajectory_id, []).append(item)
    rewards: dict[str, list[StoredReward]] = {}
    for reward in _rewards(connection, project, ids):
        rewards.setdefault(reward.trajectory_id, []).append(reward)
    return [
        StoredTrajectory(
            **{name: row[name] for name in _FIELDS},
            completions=completions.get(row["id"], []),
            rewards=rewards.get(row["id"], []),
        )
        for row in rows
    ]


def _names(connection: Connection, project: str) -> list[str]:
    """The policies that have groups, found by stepping from one to the next in the index."""
    found: list[str] = []
    query = select(func.min(Group.policy)).where(Group.project == project)
    name = connection.execute(query).scalar_one()
    while name is not None:
        found.append(name)
        name = connection.execute(query.where(Group.policy > name)).scalar_one()
    return found


def groups(
    connection: Connection,
    project: str,
    policy_name: str | None = None,
    *,
    now: float,
    limit: int = 100,
    before: float | None = None,
) -> list[GroupSummary]:
    """Groups, the most recently active first."""
    # One whose only trajectory became a group of its own is nobody's. Not EXISTS, for which
    # PostgreSQL may read all trajectories of the policy at once.
    member = (
        select(Trajectory.id)
        .where(
            Trajectory.project == Group.project,
            Trajectory.policy == Group.policy,
            Trajectory.group_id == Group.id,
        )
        .limit(1)
        .scalar_subquery()
    )
    query = select(Group.__table__).where(Group.project == project, member.is_not(None))
    if before is not None:
        query = query.where(Group.updated_at < before)
    query = query.order_by(Group.updated_at.desc(), Group.id).limit(limit)
    names = [policy_name] if policy_name is not None else _names(connection, project)
    # Policy by policy, each from the end of its index: over all of them the groups would be sorted.
    found = [
        row
        for name in names
        for row in connection.execute(query.where(Group.policy == name)).mappings()
    ]
    rows = sorted(found, key=lambda row: (-row["updated_at"], row["id"]))[:limit]
    counts: dict[tuple[str, str], list[Any]] = {}
    members = (
        select(
            Trajectory.policy,
            Trajectory.group_id,
            Trajectory.state,
            Trajectory.rewarded,
            Trajectory.reason,
            Trajectory.split,
            func.count(),
        )
        .where(
            Trajectory.project == project,
            Trajectory.policy.in_({row["policy"] for row in rows}),
            Trajectory.group_id.in_([row["id"] for row in rows]),
        )
        .group_by(
            Trajectory.policy,
            Trajectory.group_id,
            Trajectory.state,
            Trajectory.rewarded,
            Trajectory.reason,
            Trajectory.split,
        )
    )
    for name, group_id, *rest in connection.execute(members):
        counts.setdefault((name, group_id), []).append(rest)
    return [_summary(row, counts.get((row["policy"], row["id"]), []), now) for row in rows]


def _summary(row: RowMapping, counts: list[Any], now: float) -> GroupSummary:
    total = sum(count for *_, count in counts)
    used = sum(count for state, *_, count in counts if state == "used")
    skipped = sum(count for state, *_, count in counts if state == "skipped")
    reasons: dict[str, int] = {}
    for _, _, reason, _, count in counts:
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + count
    if row["reason"] is not None:
        # A step with it was undone; it waits for another one.
        reasons[row["reason"]] = total - used - skipped
    state = "open"
    if row["lease_owner"] is not None and row["lease_expires"] > now:
        state = "claimed"
    elif total and used + skipped == total:
        state = "trained"
    elif total and all(split == "eval" for *_, split, _ in counts):
        state = "held_out"
    return GroupSummary(
        id=row["id"],
        policy=row["policy"],
        task=row["task"],
        state=state,
        trajectories=total,
        rewarded=sum(count for _, rewarded, *_, count in counts if rewarded),
        used=used,
        skipped=skipped,
        reasons=reasons,
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        closed_at=row["closed_at"],
        waiting=row["waiting"],
        choices=row["choices"],
        oldest_at=row["oldest_at"],
    )


def rewards_of(
    connection: Connection, project: str, trajectory_id: str | None, completion_id: str | None
) -> list[StoredReward]:
    """The rewards of a trajectory or of one of its completions, oldest first."""
    ids = [trajectory_id] if trajectory_id is not None else None
    return _rewards(connection, project, ids, completion_id)


def _rewards(
    connection: Connection,
    project: str,
    trajectory_ids: Sequence[str] | None,
    completion_id: str | None = None,
) -> list[StoredReward]:
    values: dict[str, Any] = {"of_project": project}
    if trajectory_ids is not None:
        values["ids"] = list(trajectory_ids)
    if completion_id is not None:
        values["completion"] = completion_id
    query = _rewards_query("ids" in values, "completion" in values)
    return [reward_of(row) for row in connection.execute(query, values).mappings()]


@cache
def _rewards_query(by_trajectory: bool, by_completion: bool) -> Select[Any]:
    query = (
        select(Reward.__table__)
        .where(Reward.project == bindparam("of_project"), Reward.withdrawn_at.is_(None))
        .order_by(Reward.row)
    )
    if by_trajectory:
        query = query.where(Reward.trajectory_id.in_(bindparam("ids", expanding=True)))
    if by_completion:
        query = query.where(Reward.completion_id == bindparam("completion"))
    return query


def reward_of(row: RowMapping) -> StoredReward:
    """A row of the rewards table as a record."""
    return StoredReward(
        id=row["id"],
        trajectory_id=row["trajectory_id"],
        completion_id=row["completion_id"],
        choice=row["choice"],
        name=row["name"],
        # SQLite gives a whole number that was just inserted back as an integer.
        reward=float(row["reward"]),
        comment=row["comment"],
        metadata=row["details"],
        source=row["source"],
        created_at=row["created_at"],
    )
