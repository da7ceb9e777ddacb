"""Choices of one completion that are rewarded one by one are a group of their own.

They are compared with each other, and not with other episodes of the same task. Where the client
named the group itself, it stays in that.
"""

import time
from collections.abc import Collection

from sqlalchemy import Connection, RowMapping, delete, exists, func, insert, literal, select, update

from gateway.store.models import Choice, Completion, Group, Trajectory


def set_apart(connection: Connection, completion_ids: Collection[str]) -> None:
    """Move the trajectories of completions whose choices were rewarded into groups of their own.

    The caller holds the groups that they are in. A trajectory that was decided about stays where it
    is, and so does one whose group has a name from the client.
    """
    answers = (
        select(func.count())
        .where(Choice.completion_id == Completion.id)
        .correlate(Completion)
        .scalar_subquery()
    )
    query = (
        select(
            Completion.id.label("completion_id"),
            Trajectory.id.label("trajectory_id"),
            Trajectory.created_at.label("began_at"),
            Group,
        )
        .join(
            Trajectory,
            (Trajectory.project == Completion.project)
            & (Trajectory.id == Completion.trajectory_id),
        )
        .join(
            Group,
            (Group.project == Trajectory.project)
            & (Group.policy == Trajectory.policy)
            & (Group.id == Trajectory.group_id),
        )
        .where(
            Completion.id.in_(completion_ids),
            Trajectory.rewarded,
            Trajectory.state == "open",
            Trajectory.settled_revision.is_(None),
            Trajectory.split == "train",
            Group.choices.is_(None),
            Group.id == literal("task-") + Group.task,
            answers > 1,
        )
        .order_by(Completion.id)
    )
    moved = set()
    for row in connection.execute(query).mappings().all():
        trajectory = (row["project"], row["trajectory_id"])
        if trajectory not in moved:
            moved.add(trajectory)
            _move(connection, row)


def _move(connection: Connection, row: RowMapping) -> None:
    project, policy = row["project"], row["policy"]
    name = f"choices-{row['completion_id']}"
    connection.execute(
        insert(Group).values(
            project=project,
            policy=policy,
            id=name,
            task=row["task"],
            created_at=row["began_at"],
            updated_at=time.time(),
            closed_at=row["closed_at"],
            # A trainer that holds the trajectory goes on holding it.
            lease_owner=row["lease_owner"],
            lease_expires=row["lease_expires"],
            choices=0,
        )
    )
    connection.execute(
        update(Trajectory)
        .where(Trajectory.project == project, Trajectory.id == row["trajectory_id"])
        .values(group_id=name)
    )
    left = exists().where(
        Trajectory.project == project,
        Trajectory.policy == policy,
        Trajectory.group_id == row["id"],
    )
    connection.execute(
        delete(Group).where(
            Group.project == project,
            Group.policy == policy,
            Group.id == row["id"],
            Group.lease_owner.is_(None),
            ~left,
        )
    )
