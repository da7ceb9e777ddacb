"""What has to be read beside the waiting members of a group to know what they are worth.

Sub-agents: a trajectory that names another as its parent and has no reward of its own shares the
parent's. If the parent belongs to the same policy, the sub-agent is a part of the parent's episode
and is read with it, wherever it was grouped. If not (the parent is another model's, or held out),
it waits in its own group and is lent the parent's rewards.

Peers: members of the group that were decided about before. A reward that comes late, or changes,
is compared with theirs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    ColumnExpressionArgument,
    Connection,
    Float,
    ScalarSelect,
    bindparam,
    func,
    or_,
    select,
)
from sqlalchemy.orm import aliased

from gateway.store import baselines, queries, revisions
from gateway.store.baselines import NOTHING, Running
from gateway.store.models import Trajectory
from gateway.store.records import StoredTrajectory

PEERS = 32
"""Most earlier members of a group that are read to compare a late reward with."""

_Parent = aliased(Trajectory)
_ANCESTORS = 16
"""Sub-agents of sub-agents are followed this far."""


def _parent(*conditions: ColumnExpressionArgument[bool]) -> ScalarSelect[str]:
    # Not EXISTS, for which PostgreSQL may read all trajectories at once and keep what fits.
    same = (_Parent.project == Trajectory.project, _Parent.id == Trajectory.parent_id)
    return select(_Parent.id).where(*same, *conditions).scalar_subquery()


stands_alone: ColumnElement[bool] = or_(
    Trajectory.rewarded,
    Trajectory.parent_id.is_(None),
    _parent(_Parent.policy == Trajectory.policy, _Parent.split == Trajectory.split).is_(None),
)
"""Whether a trajectory is a member of its group, not a part of its parent's episode."""

has_reward: ColumnElement[bool] = or_(
    Trajectory.rewarded,
    _parent(_Parent.policy != Trajectory.policy, _Parent.rewarded).is_not(None),
)
"""Whether a trajectory has a reward, of its own or lent by a parent of another policy."""


@dataclass(slots=True)
class Relatives:
    """What belongs to the waiting members of a group."""

    children: list[StoredTrajectory] = field(default_factory=list)
    """Sub-agents, and theirs, that share the rewards of the members."""
    lent: dict[str, StoredTrajectory] = field(default_factory=dict)
    """Of members without a reward of their own, by id: the trajectory whose rewards they share."""
    peers: list[StoredTrajectory] = field(default_factory=list)
    """Members that were decided about before, those nearest in time."""
    taught: dict[tuple[str, int], float] = field(default_factory=dict)
    """Advantages that the policy's head has already been trained with, by completion and choice."""
    running: Running = NOTHING
    """The running baseline of the policy."""
    running_task: Running = NOTHING
    """That of the group's task."""


def find(
    connection: Connection,
    project: str,
    policy: str,
    head: int,
    members: Sequence[StoredTrajectory],
    *,
    task: str | None,
    with_peers: bool,
) -> Relatives:
    """The relatives of members of one group."""
    peers = _peers(connection, project, policy, members) if with_peers else []
    family = [*members, *peers]
    children = _children(connection, project, policy, [member.id for member in family])
    revised = [m.id for m in [*members, *children] if m.settled_revision is not None]
    running = baselines.read_all(connection, project, policy, ["", *filter(None, [task])])
    return Relatives(
        children=children,
        lent={
            member.id: lender
            for member in family
            if not member.rewards
            and (lender := _lender(connection, project, member.parent_id)) is not None
        },
        peers=peers,
        taught=revisions.taught(connection, project, policy, head, revised),
        running=running.get("", NOTHING),
        running_task=running.get(task, NOTHING) if task else NOTHING,
    )


_CHILDREN = select(Trajectory.id).where(
    Trajectory.project == bindparam("of_project"),
    Trajectory.policy == bindparam("of_policy"),
    Trajectory.split == "train",
    Trajectory.parent_id.in_(bindparam("parents", expanding=True)),
    ~Trajectory.rewarded,
)


def _children(
    connection: Connection, project: str, policy: str, parents: Iterable[str]
) -> list[StoredTrajectory]:
    found: list[str] = []
    level = list(parents)
    while level:
        values = {"of_project": project, "of_policy": policy, "parents": level}
        below = connection.execute(_CHILDREN, values).scalars()
        level = [id for id in below if id not in found]
        found.extend(level)
    return queries.trajectories(connection, project, found) if found else []


def _lender(connection: Connection, project: str, parent_id: str | None) -> StoredTrajectory | None:
    for _ in range(_ANCESTORS):
        if parent_id is None:
            return None
        parent = queries.trajectory(connection, project, parent_id)
        if parent is None:
            return None
        if parent.rewards:
            return parent
        parent_id = parent.parent_id
    return None


_DISTANCE: Any = func.abs(Trajectory.created_at - bindparam("at", type_=Float))
_PEERS = (
    select(Trajectory.id)
    .where(
        Trajectory.project == bindparam("of_project"),
        Trajectory.policy == bindparam("of_policy"),
        Trajectory.group_id == bindparam("of_group"),
        Trajectory.split == "train",
        stands_alone,
        has_reward,
        or_(Trajectory.state == "used", Trajectory.reason.in_(("equal_rewards", "too_few"))),
    )
    .order_by(_DISTANCE, Trajectory.id)
    .limit(bindparam("most"))
)


def _peers(
    connection: Connection, project: str, policy: str, members: Sequence[StoredTrajectory]
) -> list[StoredTrajectory]:
    first = members[0]
    known = {member.id for member in members}
    values = {
        "of_project": project,
        "of_policy": policy,
        "of_group": first.group_id,
        "at": first.created_at,
        "most": PEERS + len(known),
    }
    ids = [id for id in connection.execute(_PEERS, values).scalars() if id not in known][:PEERS]
    return queries.trajectories(connection, project, ids) if ids else []
