"""Deleting from the trajectory database without harm to what stays.

A turn is stored as what it adds to the turn before (see `rows`), so the turns that continue a
deleted one are first written anew: against the nearest turn before them that stays, or whole.

What a step consumed (`completion_uses`) is history and stays, unless it is to be forgotten too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, delete, exists, select, update

from gateway.store import waiting
from gateway.store.models import Choice, Completion, CompletionUse, Group, Reward, Trajectory
from gateway.store.reading import stored_completions
from gateway.store.records import (
    CapturedChoice,
    CapturedCompletion,
    StoredCompletion,
    Tail,
    TrajectoryRef,
)
from gateway.store.rows import encode

_SHARING = (
    "parent_id",
    "parent_choice",
    "request",
    "messages",
    "messages_shared",
    "prompt_ids",
    "prompt_shared",
)
"""The columns of a completion that say what it repeats of its parent."""


@dataclass(slots=True)
class Deleted:
    """How much was deleted."""

    completions: int = 0
    trajectories: int = 0

    def __add__(self, other: "Deleted") -> "Deleted":
        return Deleted(self.completions + other.completions, self.trajectories + other.trajectories)


def delete_completions(
    connection: Connection, project: str, ids: Sequence[str], *, forget_uses: bool = False
) -> Deleted:
    """Delete completions with their rewards, and trajectories that have none left.

    Args:
        ids: those that are not in the database are passed over. At most some hundreds at once:
            other writes wait meanwhile.
        forget_uses: delete the record of which steps consumed them too.
    """
    wanted = (Completion.project == project, Completion.id.in_(ids))
    places = set(connection.execute(select(Completion.trajectory_id).where(*wanted)).scalars())
    _lock(connection, project, places)
    # Only now: what another gateway deleted or added while this one waited is to count.
    columns = (
        Completion.id,
        Completion.trajectory_id,
        Completion.parent_id,
        Completion.parent_choice,
    )
    doomed = {
        row["id"]: row for row in connection.execute(select(*columns).where(*wanted)).mappings()
    }
    _relink(connection, project, doomed, places)
    _forget(connection, project, list(doomed), forget_uses)
    connection.execute(delete(Completion).where(Completion.id.in_(doomed)))
    _free_choices(connection, project, doomed)
    _recount_rewards(connection, project, places)
    groups = waiting.groups_of(connection, project, places)
    left = set(
        connection.execute(
            select(Completion.trajectory_id)
            .where(Completion.project == project, Completion.trajectory_id.in_(places))
            .distinct()
        ).scalars()
    )
    emptied = _remove_trajectories(connection, project, sorted(places - left))
    waiting.hold(connection, groups)
    waiting.count(connection, groups)
    return Deleted(len(doomed), emptied)


def delete_trajectories(
    connection: Connection, project: str, ids: Sequence[str], *, forget_uses: bool = False
) -> Deleted:
    """Delete trajectories with their completions and rewards; arguments as above."""
    _lock(connection, project, ids)
    completions = list(
        connection.execute(
            select(Completion.id).where(
                Completion.project == project, Completion.trajectory_id.in_(ids)
            )
        ).scalars()
    )
    if forget_uses:
        connection.execute(
            delete(CompletionUse).where(CompletionUse.completion_id.in_(completions))
        )
    return Deleted(len(completions), _remove_trajectories(connection, project, ids))


def delete_older_than(
    connection: Connection, project: str, before: float, limit: int, *, forget_uses: bool = False
) -> Deleted:
    """Delete up to `limit` trajectories in which nothing happened since `before`, oldest first.

    Args:
        before: Unix seconds. A completion or a reward that came later keeps its trajectory.

    To delete all, call it, each time in a transaction of its own, until it deletes fewer than
    `limit` trajectories.
    """
    query = (
        select(Trajectory.id)
        .where(
            Trajectory.project == project,
            # The first condition follows from the second, and has an index.
            Trajectory.created_at < before,
            Trajectory.updated_at < before,
        )
        .order_by(Trajectory.created_at)
        .limit(limit)
    )
    ids = list(connection.execute(query).scalars())
    return delete_trajectories(connection, project, ids, forget_uses=forget_uses)


def _lock(connection: Connection, project: str, trajectory_ids: Sequence[str] | set[str]) -> None:
    # A turn is stored after an upsert of its group and trajectory, which waits for these locks. In
    # the order of the writer, so that the two never wait for each other in a circle. (SQLite has
    # one writer at a time, and ignores it.)
    waiting.hold(connection, waiting.groups_of(connection, project, trajectory_ids))
    connection.execute(
        select(Trajectory.id)
        .where(Trajectory.project == project, Trajectory.id.in_(trajectory_ids))
        .order_by(Trajectory.policy, Trajectory.id)
        .with_for_update()
    ).all()


def _relink(
    connection: Connection, project: str, doomed: Mapping[str, RowMapping], places: set[str]
) -> None:
    orphaned = (
        select(Completion.trajectory_id)
        .where(
            Completion.project == project,
            Completion.trajectory_id.in_(places),
            Completion.parent_id.in_(doomed),
            Completion.id.not_in(doomed),
        )
        .distinct()
    )
    for trajectory_id in connection.execute(orphaned).scalars().all():
        whole = {c.id: c for c in stored_completions(connection, project, [trajectory_id])}
        for completion in whole.values():
            if completion.parent_id in doomed and completion.id not in doomed:
                row = encode(
                    _captured(project, completion, _tail(project, completion, doomed, whole))
                )
                connection.execute(
                    update(Completion)
                    .where(Completion.id == completion.id)
                    .values({name: row.completion[name] for name in _SHARING})
                )


def _tail(
    project: str,
    completion: StoredCompletion,
    doomed: Mapping[str, RowMapping],
    whole: Mapping[str, StoredCompletion],
) -> Tail | None:
    """The end of the nearest turn before `completion` that stays."""
    parent_id, choice = completion.parent_id, completion.parent_choice
    while parent_id is not None and parent_id in doomed:
        parent_id, choice = doomed[parent_id]["parent_id"], doomed[parent_id]["parent_choice"]
    if parent_id is None or parent_id not in whole or choice is None:
        return None
    return encode(_captured(project, whole[parent_id], None)).tails.get(_key(choice))


def _key(choice: int) -> bytes:
    # Stands for the thread key, which only the gateway can compute and nothing here compares.
    return choice.to_bytes(4, "big")


def _captured(project: str, stored: StoredCompletion, tail: Tail | None) -> CapturedCompletion:
    """What `encode` needs of a completion to say what it shares with `tail`."""
    return CapturedCompletion(
        id=stored.id,
        project=project,
        trajectory=TrajectoryRef(stored.trajectory_id, "", ""),
        policy=stored.policy,
        version=stored.version,
        trained=False,
        messages=stored.messages,
        request=stored.request,
        stream=stored.stream,
        created_at=stored.created_at,
        tail=tail,
        prompt_ids=stored.prompt_ids,
        choices=[
            CapturedChoice(c.index, c.finish_reason, c.token_ids, c.logprobs, _key(c.index))
            for c in stored.choices
        ],
    )


def _forget(connection: Connection, project: str, ids: Sequence[str], forget_uses: bool) -> None:
    connection.execute(
        delete(Reward).where(Reward.project == project, Reward.completion_id.in_(ids))
    )
    if forget_uses:
        connection.execute(delete(CompletionUse).where(CompletionUse.completion_id.in_(ids)))


def _free_choices(connection: Connection, project: str, doomed: Mapping[str, RowMapping]) -> None:
    """An answer that nothing continues any more says so."""
    ends = {
        (row["trajectory_id"], row["parent_id"], row["parent_choice"])
        for row in doomed.values()
        if row["parent_id"] is not None and row["parent_id"] not in doomed
    }
    for trajectory_id, parent_id, choice in sorted(ends):
        continues: Any = exists().where(
            Completion.project == project,
            Completion.trajectory_id == trajectory_id,
            Completion.parent_id == parent_id,
            Completion.parent_choice == choice,
        )
        connection.execute(
            update(Choice)
            .where(Choice.completion_id == parent_id, Choice.index == choice, ~continues)
            .values(continued=False)
        )


def _recount_rewards(connection: Connection, project: str, trajectory_ids: set[str]) -> None:
    rewarded = exists().where(
        Reward.project == project,
        Reward.trajectory_id == Trajectory.id,
        Reward.withdrawn_at.is_(None),
    )
    connection.execute(
        update(Trajectory)
        .where(
            Trajectory.project == project,
            Trajectory.id.in_(trajectory_ids),
            Trajectory.rewarded,
            ~rewarded,
        )
        .values(rewarded=False)
    )


def _remove_trajectories(connection: Connection, project: str, ids: Sequence[str]) -> int:
    """Delete trajectories, and groups that have none left; the database deletes what they hold."""
    mine = (Trajectory.project == project, Trajectory.id.in_(ids))
    groups = select(Trajectory.policy, Trajectory.group_id).where(*mine).distinct()
    touched = sorted(tuple(row) for row in connection.execute(groups))
    count = connection.execute(delete(Trajectory).where(*mine)).rowcount
    for policy, group_id in touched:
        group = (Group.project == project, Group.policy == policy, Group.id == group_id)
        # A trainer that holds the group must find it again. Locked before it is looked into: a
        # trajectory that another gateway adds has touched the group, or will make it anew.
        free = select(Group.id).where(*group, Group.lease_owner.is_(None)).with_for_update()
        if connection.execute(free).first() is not None:
            member = exists().where(
                Trajectory.project == project,
                Trajectory.policy == policy,
                Trajectory.group_id == group_id,
            )
            connection.execute(delete(Group).where(*group, ~member))
    return count
