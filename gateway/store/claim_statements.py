"""The statements of a claim, built once: building them anew takes longer than PostgreSQL does.

What changes from claim to claim is in parameters: `of_project`, `of_policy`, times in Unix seconds,
`ids` of groups. An index of some rows alone is only taken where a statement is seen to fit, so
the conditions of those indexes are spelt out.
"""

from functools import cache
from typing import Any

from sqlalchemy import (
    Select,
    String,
    Update,
    bindparam,
    func,
    or_,
    select,
    text,
    union,
    update,
)

from gateway.store import waiting
from gateway.store.models import Group, Trajectory
from gateway.store.relatives import has_reward, stands_alone

MOST = 256
"""Trajectories of one group that are taken at once; the rest of a larger one is taken next."""

_OF_POLICY = (
    Group.project == bindparam("of_project"),
    Group.policy == bindparam("of_policy"),
)
_FREE = (
    *_OF_POLICY,
    or_(Group.lease_owner.is_(None), Group.lease_expires < bindparam("now")),
)
_MEMBERS = (
    Trajectory.project == bindparam("of_project"),
    Trajectory.policy == bindparam("of_policy"),
)

_SOME = text("groups.waiting > 0")
_ENDED = text(
    "(groups.closed_at IS NOT NULL OR groups.choices IS NOT NULL) AND groups.oldest_at IS NOT NULL"
)
_WAYS = (
    (_SOME, Group.waiting >= bindparam("size")),
    (_SOME, Group.oldest_at <= bindparam("began_before")),
    (_ENDED, or_(Group.closed_at.is_not(None), Group.waiting >= Group.choices)),
)
_COLUMNS = (Group.id, Group.strikes, Group.oldest_at, Group.waiting, Group.closed_at)
_FOUND = union(
    *(
        select(
            select(*_COLUMNS)
            .where(*_FREE, *way)
            .order_by(Group.strikes, Group.oldest_at)
            .limit(bindparam("most"))
            .subquery()
        )
        for way in _WAYS
    )
).subquery()
_NEWEST = (
    select(func.max(Trajectory.updated_at))
    .where(
        *_MEMBERS,
        Trajectory.group_id == _FOUND.c.id,
        waiting.FRESH,
        Trajectory.rewarded.is_(True),
    )
    .scalar_subquery()
)

READY = select(_FOUND, _NEWEST.label("newest"))
"""Up to `most` groups for each way to be ready (`size` members, begun before `began_before`,
ended): those with fewest strikes, and of them the longest waiting; and when something was last
added to their rewarded members. One statement, the same for any number of groups, so that
PostgreSQL plans it once."""

ONE = select(Group.__table__).where(*_FREE, Group.id == bindparam("id", type_=String))
"""The group `id`, if nobody holds it."""

LOCK = ONE.with_only_columns(Group.id).with_for_update(skip_locked=True)
"""Take its row for the rest of the transaction, unless somebody else has it."""

LEASE: Update = (
    update(Group)
    .where(*_OF_POLICY, Group.id.in_(bindparam("ids", expanding=True)))
    .values(lease_owner=bindparam("worker"), lease_expires=bindparam("until"))
)


@cache
def members(fresh: bool, final: bool) -> Select[Any]:
    """The waiting members of the group `id`, the rewarded ones first.

    Args:
        fresh: also those that were not decided about before.
        final: also those of them that have no reward.
    """
    query = select(Trajectory.__table__).where(
        *_MEMBERS, Trajectory.group_id == bindparam("id"), waiting.OPEN, stands_alone
    )
    if not fresh:
        query = query.where(Trajectory.settled_revision.is_not(None))
    elif not final:
        query = query.where(or_(Trajectory.settled_revision.is_not(None), has_reward))
    return query.order_by(Trajectory.rewarded.desc(), Trajectory.created_at).limit(MOST)
