"""The members of one group side by side: their answers, what they were worth and became."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from gateway.store import codec
from gateway.store.models import Completion, CompletionUse, Group, Policy, Reward, Trajectory


@dataclass(slots=True)
class Member:
    """One trajectory of a group."""

    id: str
    split: str
    state: str
    reason: str | None
    step_id: int | None
    created_at: float
    updated_at: float
    turns: int
    version: int | None
    """The one that its last turn was sampled from."""
    tokens: int
    """Sampled in all turns."""
    answer: dict[str, Any] | None
    """The message that its last turn answered with."""
    finish_reason: str | None
    reward: float | None
    """The weighted sum of its newest rewards; None: there is none."""
    rewards: dict[str, float] = field(default_factory=dict)
    """That, by name."""
    advantage: float | None = None


@dataclass(slots=True)
class GroupView:
    """A group and its members, those that were worth most first."""

    project: str
    policy: str
    id: str
    task: str | None
    created_at: float
    updated_at: float
    closed_at: float | None
    members: list[Member]
    more: int
    """Members beyond those shown."""


def view(
    connection: Connection, project: str, group_id: str, policy: str | None = None, limit: int = 32
) -> GroupView | None:
    """A group; without `policy`, the newest of that id."""
    query = select(Group.__table__).where(Group.project == project, Group.id == group_id)
    if policy is not None:
        query = query.where(Group.policy == policy)
    query = query.order_by(Group.updated_at.desc()).limit(1)
    group = connection.execute(query).mappings().one_or_none()
    if group is None:
        return None
    of_group = (
        Trajectory.project == project,
        Trajectory.policy == group["policy"],
        Trajectory.group_id == group_id,
    )
    total = connection.execute(select(func.count()).where(*of_group)).scalar_one()
    chosen = (
        select(Trajectory.__table__)
        .where(*of_group)
        .order_by(Trajectory.rewarded.desc(), Trajectory.created_at, Trajectory.id)
        .limit(limit)
    )
    rows = list(connection.execute(chosen).mappings())
    ids = [row["id"] for row in rows]
    last, turns, tokens = _turns(connection, project, ids)
    weights = connection.execute(
        select(Policy.settings).where(Policy.project == project, Policy.name == group["policy"])
    ).scalar_one_or_none()
    rewards = newest_rewards(connection, project, ids, (weights or {}).get("reward_weights", {}))
    advantages = _advantages(connection, ids)
    members = []
    for row in rows:
        end = last.get(row["id"])
        answer = _answer(end["response"]) if end is not None else (None, None)
        named = rewards.get(row["id"], {})
        members.append(
            Member(
                **{
                    key: row[key]
                    for key in (
                        *("id", "split", "state", "reason", "step_id"),
                        *("created_at", "updated_at"),
                    )
                },
                turns=turns.get(row["id"], 0),
                version=end["version"] if end is not None else None,
                tokens=tokens.get(row["id"], 0),
                answer=answer[0],
                finish_reason=answer[1],
                reward=sum(named.values()) if named else None,
                rewards=named,
                advantage=advantages.get(row["id"]),
            )
        )
    members.sort(key=lambda m: (m.reward is None, -(m.reward or 0.0)))
    shown = ("project", "policy", "id", "task", "created_at", "updated_at", "closed_at")
    return GroupView(
        **{key: group[key] for key in shown}, members=members, more=max(0, total - len(members))
    )


def _turns(
    connection: Connection, project: str, ids: Sequence[str]
) -> tuple[dict[str, Any], dict[str, int], dict[str, int]]:
    query = select(
        Completion.id,
        Completion.trajectory_id,
        Completion.version,
        Completion.completion_tokens,
        Completion.created_at,
    ).where(Completion.project == project, Completion.trajectory_id.in_(ids))
    # Sorted here: asked for the order, SQLite goes through all completions in it.
    found = sorted(connection.execute(query).mappings(), key=lambda r: (r["created_at"], r["id"]))
    newest: dict[str, Any] = {}
    turns: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for row in found:
        owner = row["trajectory_id"]
        newest[owner] = dict(row)
        turns[owner] = turns.get(owner, 0) + 1
        tokens[owner] = tokens.get(owner, 0) + (row["completion_tokens"] or 0)
    wanted = [row["id"] for row in newest.values()]
    responses = dict(
        connection.execute(
            select(Completion.id, Completion.response).where(Completion.id.in_(wanted))
        )
        .tuples()
        .all()
    )
    for row in newest.values():
        row["response"] = responses.get(row["id"])
    return newest, turns, tokens


def _answer(response: bytes | None) -> tuple[dict[str, Any] | None, str | None]:
    body = codec.decode_json(response) if response is not None else None
    choices = body.get("choices") if isinstance(body, dict) else None
    if not choices:
        return None, None
    return choices[0].get("message"), choices[0].get("finish_reason")


def newest_rewards(
    connection: Connection, project: str, ids: Sequence[str], weights: dict[str, float]
) -> dict[str, dict[str, float]]:
    """What the rewards that count come to, weighted, by trajectory and name."""
    query = (
        select(
            Reward.trajectory_id, Reward.completion_id, Reward.choice, Reward.name, Reward.reward
        )
        .where(
            Reward.project == project,
            Reward.trajectory_id.in_(ids),
            Reward.withdrawn_at.is_(None),
        )
        .order_by(Reward.row)
    )
    newest: dict[tuple[Any, ...], float] = {}
    for *target, value in connection.execute(query):
        newest[tuple(target)] = value
    found: dict[str, dict[str, float]] = {}
    for (trajectory, _, _, name), value in newest.items():
        named = found.setdefault(trajectory, {})
        named[name] = named.get(name, 0.0) + weights.get(name, 1.0) * value
    return found


def _advantages(connection: Connection, ids: Sequence[str]) -> dict[str, float]:
    """Of each trajectory, the advantage that its newest use had."""
    query = (
        select(CompletionUse.trajectory_id, CompletionUse.advantage)
        .where(CompletionUse.trajectory_id.in_(ids), CompletionUse.advantage.is_not(None))
        .order_by(CompletionUse.row)
    )
    return {owner: value for owner, value in connection.execute(query) if value is not None}
