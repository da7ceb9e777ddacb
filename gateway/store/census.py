"""Counts over the whole database, for metrics: what waits, what was trained on, what it earned."""

import time
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, and_, case, func, select

from gateway.store import outbox
from gateway.store.models import Event, Group, Policy, Step, Trajectory, Version
from gateway.store.readiness import is_ready
from gateway.store.statistics import VersionReward, rewards_by_version

Key = tuple[str, ...]


@dataclass(slots=True)
class Census:
    """Numbers by labels; each key begins with project and policy."""

    groups: dict[Key, int] = field(default_factory=dict)
    """By state and reason: `open`, `ready` (see `readiness`),
    `claimed`, `trained`, `skipped` (nothing of it was trained on; the reason says why),
    `held_out`."""
    trajectories: dict[Key, int] = field(default_factory=dict)
    """By split, state, and the reason why one was left out."""
    oldest_ready: dict[Key, float] = field(default_factory=dict)
    """Unix seconds since when the longest waiting ready group has been as it is."""
    steps: dict[Key, int] = field(default_factory=dict)
    """By state."""
    last_step: dict[Key, float] = field(default_factory=dict)
    """Unix seconds at which the newest step that was done ended."""
    events: dict[Key, int] = field(default_factory=dict)
    """By kind."""
    last_event: dict[Key, float] = field(default_factory=dict)
    """By kind: Unix seconds of the newest."""
    versions: dict[Key, int] = field(default_factory=dict)
    """By state."""
    rewards: dict[tuple[str, str], list[VersionReward]] = field(default_factory=dict)
    """Of each policy, by version and split."""
    langfuse: list[outbox.Lag] = field(default_factory=list)
    """What has not reached Langfuse, by project."""


def take(connection: Connection) -> Census:
    """Count. On a large database this takes seconds; the caller remembers the answer."""
    found = Census()
    _groups(connection, found)
    columns = (Trajectory.project, Trajectory.policy, Trajectory.split, Trajectory.state)
    query = select(*columns, Trajectory.reason, func.count()).group_by(*columns, Trajectory.reason)
    for project, policy, split, state, reason, count in connection.execute(query):
        found.trajectories[project, policy, split, state, reason or ""] = count
    _by_state(connection, found.steps, Step)
    _by_state(connection, found.versions, Version)
    done = select(Step.project, Step.policy, func.max(Step.finished_at)).where(Step.state == "done")
    for project, policy, at in connection.execute(done.group_by(Step.project, Step.policy)):
        found.last_step[project, policy] = at or 0.0
    kinds = (Event.project, Event.policy, Event.kind)
    for *key, count, at in connection.execute(
        select(*kinds, func.count(), func.max(Event.at)).group_by(*kinds)
    ):
        found.events[tuple(key)], found.last_event[tuple(key)] = count, at
    found.langfuse = outbox.lag(connection, time.time())
    for project, policy in connection.execute(select(Policy.project, Policy.name)).all():
        found.rewards[project, policy] = rewards_by_version(connection, project, policy)
    return found


def _by_state(connection: Connection, into: dict[Key, int], table: type[Step | Version]) -> None:
    columns = (table.project, table.policy, table.state)
    for *key, count in connection.execute(select(*columns, func.count()).group_by(*columns)):
        into[tuple(key)] = count


def _groups(connection: Connection, found: Census) -> None:
    now = time.time()

    def number(*conditions: Any) -> Any:
        return func.sum(case((and_(*conditions), 1), else_=0))

    waiting = (Trajectory.state == "open", Trajectory.split == "train")
    members = (
        select(
            Trajectory.project,
            Trajectory.policy,
            Trajectory.group_id,
            number(*waiting).label("waiting"),
            number(Trajectory.split != "eval").label("training"),
            number(Trajectory.state == "used").label("used"),
            func.max(Trajectory.reason).label("reason"),
            func.max(Trajectory.updated_at).label("updated_at"),
        )
        .group_by(Trajectory.project, Trajectory.policy, Trajectory.group_id)
        .subquery()
    )
    claimed = and_(Group.lease_owner.is_not(None), Group.lease_expires > now)
    groups = (
        select(
            Group.project,
            Group.policy,
            case(
                (claimed, "claimed"),
                (members.c.training == 0, "held_out"),
                (and_(members.c.waiting == 0, members.c.used > 0), "trained"),
                (members.c.waiting == 0, "skipped"),
                (is_ready(connection, now), "ready"),
                else_="open",
            ).label("state"),
            members.c.reason,
            members.c.updated_at,
        )
        .join(
            members,
            and_(
                members.c.project == Group.project,
                members.c.policy == Group.policy,
                members.c.group_id == Group.id,
            ),
        )
        .subquery()
    )
    why = case((groups.c.state == "skipped", groups.c.reason), else_="")
    by = (groups.c.project, groups.c.policy, groups.c.state, why)
    query = select(*by, func.count(), func.min(groups.c.updated_at)).group_by(*by)
    for project, policy, state, reason, count, since in connection.execute(query):
        key = (project, policy, state, reason or "")
        found.groups[key] = found.groups.get(key, 0) + count
        if state == "ready":
            found.oldest_ready[project, policy] = since
