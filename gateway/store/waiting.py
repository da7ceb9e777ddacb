"""What waits for training in each group, kept on the group's row.

A trainer asks every second what is ready. It must not read what is not: so a group's row says how
many rewarded members wait in it and since when, and indexes lead to the rows that matter. Whoever
changes what waits holds the group's row first and counts anew before it commits; then no two
changes can miss each other. Numbers that are too high only cost a look.

Members are trajectories that stand alone (see `relatives`) and were not decided about before. Where
choices of one completion were rewarded one by one, each of them is a member instead of their
trajectory.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    Boolean,
    Connection,
    Update,
    and_,
    bindparam,
    case,
    func,
    literal_column,
    select,
    true,
    tuple_,
    update,
)

from gateway.store.models import Choice, Group, Reward, Trajectory
from gateway.store.relatives import has_reward, stands_alone

GroupKey = tuple[str, str, str]
"""Project, policy and group id."""

_KEY = tuple_(Group.project, Group.policy, Group.id)

_NEVER = 1e300
"""Later than any time."""

_COUNTED = 4096
"""Members are counted up to here: no group is larger before it is trained on."""

# In words of their own, for an index of these rows alone is only taken where it is seen to fit.
OPEN = literal_column("trajectories.state = 'open' AND trajectories.split = 'train'", Boolean())
"""Trajectories that wait for the trainer."""

FRESH = and_(OPEN, Trajectory.settled_revision.is_(None))
"""Those of them that it has not decided about before."""

_MINE = (
    Trajectory.project == Group.project,
    Trajectory.policy == Group.policy,
    Trajectory.group_id == Group.id,
    FRESH,
)


_ANSWERS = (
    select(func.count())
    .where(Choice.completion_id == Reward.completion_id)
    .correlate(Reward)
    .scalar_subquery()
)
_REWARDED_CHOICES = (
    select(
        Trajectory.project,
        Trajectory.policy,
        Trajectory.group_id,
        Reward.trajectory_id,
        func.count(Reward.choice.distinct()),
        _ANSWERS,
    )
    .join(
        Trajectory,
        (Trajectory.project == Reward.project) & (Trajectory.id == Reward.trajectory_id),
    )
    .where(
        tuple_(Trajectory.project, Trajectory.policy, Trajectory.group_id).in_(
            bindparam("groups_", expanding=True)
        ),
        FRESH,
        Trajectory.rewarded.is_(True),
        Reward.choice.is_not(None),
        Reward.withdrawn_at.is_(None),
    )
    .group_by(
        Trajectory.project,
        Trajectory.policy,
        Trajectory.group_id,
        Reward.trajectory_id,
        Reward.completion_id,
    )
)


_SINCE = func.min(Trajectory.updated_at)
_REVISED = (
    select(Trajectory.group_id, _SINCE)
    .where(
        Trajectory.project == bindparam("of_project"),
        Trajectory.policy == bindparam("of_policy"),
        OPEN,
        Trajectory.settled_revision.is_not(None),
        stands_alone,
    )
    .group_by(Trajectory.group_id)
    .having(func.max(Trajectory.updated_at) <= bindparam("settled_before"))
    .order_by(_SINCE)
    .limit(bindparam("most"))
)


def hold(connection: Connection, groups: Iterable[GroupKey]) -> None:
    """Lock groups, in the order of the writer, until the transaction ends."""
    keys = sorted(set(groups))
    if keys:
        connection.execute(
            select(Group.id)
            .where(_KEY.in_(keys))
            .order_by(Group.project, Group.policy, Group.id)
            .with_for_update()
        ).all()


def groups_of(connection: Connection, project: str, trajectory_ids: Iterable[str]) -> set[GroupKey]:
    """The groups that trajectories are in now."""
    query = select(Trajectory.project, Trajectory.policy, Trajectory.group_id).where(
        Trajectory.project == project, Trajectory.id.in_(set(trajectory_ids))
    )
    return {(row[0], row[1], row[2]) for row in connection.execute(query)}


def recount(
    connection: Connection, changed: Iterable[tuple[str, str]], held: set[GroupKey]
) -> None:
    """Count anew in the groups of trajectories (project and id), and in those that are held."""
    by_project: dict[str, set[str]] = {}
    for project, trajectory_id in changed:
        by_project.setdefault(project, set()).add(trajectory_id)
    now = [groups_of(connection, project, ids) for project, ids in by_project.items()]
    others = {key for keys in now for key in keys} - held
    hold(connection, others)
    count(connection, held | others)


def count(connection: Connection, groups: Iterable[GroupKey]) -> None:
    """Count anew what waits in groups, which the caller holds."""
    keys = sorted(set(groups))
    if not keys:
        return
    connection.execute(_counting(connection.dialect.name == "sqlite"), {"groups_": keys})
    for key, more, choices in _choices(connection, keys):
        connection.execute(
            update(Group)
            .where(_KEY.in_([key]))
            .values(
                waiting=Group.waiting + more,
                choices=case((Group.choices.is_not(None), choices)),
            )
        )


@cache
def _counting(is_sqlite: bool) -> Update:
    """The statement that counts in the groups `groups_`; building it takes longer than running."""
    # Each kind has an index; sub-agents are few.
    kinds = (
        (Trajectory.rewarded.is_(True),),
        (Trajectory.rewarded.is_(False), Trajectory.parent_id.is_(None)),
        (Trajectory.rewarded.is_(False), Trajectory.parent_id.is_not(None), stands_alone),
    )
    rewarded, _, lent = kinds
    oldest = [
        select(func.min(Trajectory.created_at)).where(*_MINE, *kind).scalar_subquery()
        for kind in kinds
    ]
    numbers = [
        select(func.count())
        .select_from(
            select(true()).where(*_MINE, *kind).limit(_COUNTED).correlate(Group).subquery()
        )
        .scalar_subquery()
        for kind in (rewarded, (*lent, has_reward))
    ]
    least = func.min if is_sqlite else func.least
    first = func.nullif(least(*(func.coalesce(at, _NEVER) for at in oldest)), _NEVER)
    return (
        update(Group)
        .where(_KEY.in_(bindparam("groups_", expanding=True)))
        .values(waiting=numbers[0] + numbers[1], oldest_at=first)
    )


def _choices(connection: Connection, keys: Sequence[GroupKey]) -> list[tuple[GroupKey, int, int]]:
    """For groups with choices rewarded one by one: members beyond one for each trajectory, and
    how many choices the completions have."""
    found: dict[GroupKey, dict[str, list[Any]]] = {}
    for project, policy, group, trajectory, rewarded, of in connection.execute(
        _REWARDED_CHOICES, {"groups_": keys}
    ):
        # A reward for the only choice is one for the completion.
        if of > 1:
            found.setdefault((project, policy, group), {}).setdefault(trajectory, []).append(
                (rewarded, of)
            )
    return [
        (
            key,
            sum(sum(rewarded for rewarded, _ in pairs) - 1 for pairs in by_trajectory.values()),
            sum(of for pairs in by_trajectory.values() for _, of in pairs),
        )
        for key, by_trajectory in found.items()
    ]


def revised(
    connection: Connection, project: str, policy: str, *, settled_before: float, limit: int
) -> dict[str, float]:
    """Groups in which rewards of what was decided about before have changed, and since when.

    The oldest change comes first; groups in which one is newer than `settled_before` are left out.
    """
    values = {
        "of_project": project,
        "of_policy": policy,
        "settled_before": settled_before,
        "most": limit,
    }
    return dict(connection.execute(_REVISED, values).tuples().all())
