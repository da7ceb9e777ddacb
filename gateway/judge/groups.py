"""Which groups there are to be judged, what their members did, and how far judging has come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, func, insert, or_, select

from gateway.store import outbox, rewards
from gateway.store.base import insert_into
from gateway.store.models import Group, Reward, Trajectory
from gateway.store.policy_settings import PolicySettings
from gateway.store.reading import stored_completions
from gateway.store.records import Json, StoredCompletion
from gateway.store.rewards import NewReward
from gateway.store.tracing_models import JudgeCall, JudgedGroup

SOURCE = "judge"
"""Source of a judge's rewards."""

_DAY = 86_400.0
_LOOK_BACK = 7 * _DAY
"""Groups in which nothing has happened for longer are left alone."""


@dataclass(slots=True, frozen=True)
class Due:
    """A group that may have to be judged."""

    id: str
    updated_at: float
    digest: bytes | None
    """Of what was judged last."""
    state: str | None
    attempts: int


def due(
    connection: Connection,
    project: str,
    policy: str,
    settings: PolicySettings,
    now: float,
    limit: int = 20,
) -> list[Due]:
    """Groups that are complete, or old enough, and in which nothing has happened for a while."""
    assert settings.judge is not None
    members = (
        select(func.count())
        .select_from(Trajectory)
        .where(
            Trajectory.project == Group.project,
            Trajectory.policy == Group.policy,
            Trajectory.group_id == Group.id,
        )
        .correlate(Group)
        .scalar_subquery()
    )
    again = or_(
        JudgedGroup.state.is_(None),
        and_(JudgedGroup.state == "waiting", JudgedGroup.not_before <= now),
        # Of those that are settled it says what they were when they were looked at.
        and_(JudgedGroup.state != "waiting", Group.updated_at > JudgedGroup.not_before),
    )
    ripe = or_(
        members >= settings.group_size,
        Group.closed_at.is_not(None),
        # Before the trainer gives up on it.
        Group.created_at <= now - settings.deadline_seconds / 2,
    )
    query = (
        select(
            Group.id,
            Group.updated_at,
            JudgedGroup.digest,
            JudgedGroup.state,
            func.coalesce(JudgedGroup.attempts, 0),
        )
        .outerjoin(
            JudgedGroup,
            and_(
                JudgedGroup.project == Group.project,
                JudgedGroup.policy == Group.policy,
                JudgedGroup.group_id == Group.id,
            ),
        )
        .where(
            Group.project == project,
            Group.policy == policy,
            Group.updated_at > now - _LOOK_BACK,
            Group.updated_at <= now - settings.judge.settle_seconds,
            again,
            ripe,
        )
        .order_by(Group.updated_at)
        .limit(limit)
    )
    return [Due(*row) for row in connection.execute(query)]


def conversations(
    connection: Connection, project: str, policy: str, group_id: str, over_people: bool
) -> dict[str, list[Json]]:
    """What each member did, by trajectory, the oldest first: its last thread with its answer.

    Without `over_people` only of members that nobody but the judge has rewarded; and never of those
    that end with several choices.
    """
    query = (
        select(Trajectory.id)
        .where(
            Trajectory.project == project,
            Trajectory.policy == policy,
            Trajectory.group_id == group_id,
        )
        .order_by(Trajectory.created_at, Trajectory.id)
    )
    ids = list(connection.execute(query).scalars())
    if not over_people:
        rewarded = rewarded_by_others(connection, project, ids)
        ids = [each for each in ids if each not in rewarded]
    by_trajectory: dict[str, list[StoredCompletion]] = {}
    for completion in stored_completions(connection, project, ids, tokens=False):
        by_trajectory.setdefault(completion.trajectory_id, []).append(completion)
    found = {}
    for each in ids:
        messages = _last_thread(by_trajectory.get(each, []))
        if messages is not None:
            found[each] = messages
    return found


def rewarded_by_others(connection: Connection, project: str, ids: Sequence[str]) -> set[str]:
    """The trajectories among `ids` that somebody other than the judge has rewarded."""
    query = select(Reward.trajectory_id).where(
        Reward.project == project,
        Reward.trajectory_id.in_(ids),
        Reward.source != SOURCE,
        Reward.withdrawn_at.is_(None),
    )
    return set(connection.execute(query).scalars())


def _last_thread(completions: Sequence[StoredCompletion]) -> list[Json] | None:
    answered = [c for c in completions if c.status == "complete" and (c.response or {})]
    continued = {c.parent_id for c in answered}
    leaves = [c for c in answered if c.id not in continued]
    if not leaves:
        return None
    last = max(leaves, key=lambda c: (c.finished_at, c.id))
    choices = (last.response or {}).get("choices") or [{}]
    if len(choices) > 1:
        # It has no answer of its own: a place among other trajectories would be that of whichever
        # choice was shown, and would reward all of them.
        return None
    message = choices[0].get("message") or {"content": choices[0].get("text")}
    asked = last.messages or [{"role": "user", "content": str(last.request.get("prompt") or "")}]
    return [*asked, {"role": "assistant", **message}]


def settle(
    connection: Connection,
    project: str,
    policy: str,
    group_id: str,
    *,
    digest: bytes,
    state: str,
    not_before: float,
    attempts: int = 0,
    error: str | None = None,
) -> None:
    """Note how far the judging of a group has come."""
    values = {
        "digest": digest,
        "state": state,
        "attempts": attempts,
        "not_before": not_before,
        "error": error[:1000] if error is not None else None,
    }
    key = {"project": project, "policy": policy, "group_id": group_id}
    connection.execute(
        insert_into(connection, JudgedGroup)
        .values(**key, **values)
        .on_conflict_do_update(index_elements=list(key), set_=values)
    )


def post(
    connection: Connection,
    project: str,
    found: Sequence[NewReward],
    *,
    over_people: bool,
    traced: bool,
    now: float,
) -> int:
    """Post rewards of trajectories, except where somebody was faster; returns how many."""
    ids = [reward.trajectory_id for reward in found if reward.trajectory_id is not None]
    there = set(
        connection.execute(
            select(Trajectory.id).where(Trajectory.project == project, Trajectory.id.in_(ids))
        ).scalars()
    )
    taken = set() if over_people else rewarded_by_others(connection, project, ids)
    wanted = [r for r in found if r.trajectory_id in there - taken]
    if not wanted:
        return 0
    stored, _ = rewards.post(connection, project, wanted)
    if traced:
        outbox.add(connection, outbox.REWARD, [(project, each.id) for each in stored], now)
    return len(stored)


def cached(connection: Connection, key: bytes) -> Json | None:
    """The usable answer that was given to the same question before."""
    query = (
        select(JudgeCall.answer)
        .where(JudgeCall.key == key, JudgeCall.error.is_(None), JudgeCall.answer.is_not(None))
        .order_by(JudgeCall.row.desc())
        .limit(1)
    )
    return connection.execute(query).scalar_one_or_none()


def record(connection: Connection, **values: Any) -> None:
    """Note a question, its answer and its cost."""
    connection.execute(insert(JudgeCall).values(values))


def spent(connection: Connection, project: str, policy: str, now: float) -> tuple[float, int]:
    """US dollars and questions of the last 24 hours."""
    query = select(func.coalesce(func.sum(JudgeCall.cost), 0.0), func.count()).where(
        JudgeCall.project == project, JudgeCall.policy == policy, JudgeCall.at > now - _DAY
    )
    cost, calls = connection.execute(query).one()
    return float(cost), int(calls)
