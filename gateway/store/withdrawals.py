"""Taking rewards back. They stay in the log, and count no more."""

from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, select, update

from gateway.store import waiting
from gateway.store.models import Reward, Trajectory
from gateway.store.revisions import reward_changed


def withdraw(
    connection: Connection, project: str, reward_ids: Sequence[str], now: float
) -> list[str]:
    """Withdraw rewards; returns the ids of those that counted until now.

    An earlier reward of the same name, if there is one, counts again. Where that changes what a
    trajectory is worth, it is a new revision of it.
    """
    asked = (
        Reward.project == project,
        Reward.id.in_(reward_ids),
        Reward.withdrawn_at.is_(None),
    )
    ids = sorted(set(connection.execute(select(Reward.trajectory_id).where(*asked)).scalars()))
    # Groups before trajectories, and both in the order of the writer, so that the two never wait
    # for each other in a circle.
    groups = waiting.groups_of(connection, project, ids)
    waiting.hold(connection, groups)
    connection.execute(
        select(Trajectory.id)
        .where(Trajectory.project == project, Trajectory.id.in_(ids))
        .order_by(Trajectory.policy, Trajectory.id)
        .with_for_update()
    ).all()
    rows = connection.execute(
        select(Reward.__table__).where(*asked).order_by(Reward.row.desc())
    ).mappings()
    found = rows.all()
    changed: set[str] = set()
    for row in found:
        connection.execute(update(Reward).where(Reward.row == row["row"]).values(withdrawn_at=now))
        if _counted(connection, row):
            changed.add(row["trajectory_id"])
    touched: set[str] = set()
    for trajectory_id in sorted(changed):
        touched |= reward_changed(connection, project, trajectory_id, now)
    waiting.recount(connection, {(project, each) for each in touched}, groups)
    return [row["id"] for row in found]


def _counted(connection: Connection, row: RowMapping) -> bool:
    """Whether a reward that is withdrawn was the newest of its name, and the one before differs."""
    newest = connection.execute(
        select(Reward.row, Reward.reward)
        .where(
            Reward.project == row["project"],
            Reward.trajectory_id == row["trajectory_id"],
            Reward.completion_id.is_not_distinct_from(row["completion_id"]),
            Reward.choice.is_not_distinct_from(row["choice"]),
            Reward.name == row["name"],
            Reward.withdrawn_at.is_(None),
        )
        .order_by(Reward.row.desc())
        .limit(1)
    ).one_or_none()
    if newest is None:
        return True
    return newest.row < row["row"] and float(newest.reward) != float(row["reward"])
