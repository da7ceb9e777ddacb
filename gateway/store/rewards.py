"""Posting rewards: all or nothing, once per idempotency key."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Text,
    and_,
    any_,
    literal,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY

from gateway.store import codec
from gateway.store.ids import new_id
from gateway.store.models import Choice, Completion, Reward, Trajectory
from gateway.store.queries import reward_of
from gateway.store.records import StoredReward
from gateway.store.revisions import is_news, reward_changed


@dataclass(slots=True)
class NewReward:
    """A reward as it is posted: against a completion (and choice) or a trajectory."""

    reward: float
    name: str = "reward"
    completion_id: str | None = None
    choice: int | None = None
    trajectory_id: str | None = None
    comment: str | None = None
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    source: str = "api"
    # Known before the first attempt to store it, so that a second one finds what the first left.
    id: str = field(default_factory=lambda: new_id("reward-"))
    created_at: float = field(default_factory=time.time)


@dataclass(slots=True, frozen=True)
class RewardList:
    """Rewards that are stored together or not at all."""

    project: str
    rewards: Sequence[NewReward]


class RewardRefused(Exception):
    """Rewards that cannot be stored; what else is written with them can."""


class UnknownTarget(RewardRefused):
    """A reward names something that is not in the database; `param` says which field."""

    def __init__(self, index: int, param: str, name: str):
        super().__init__(f"{param} {name!r} is not known")
        self.index = index
        self.param = param
        self.name = name


class IdempotencyConflict(RewardRefused):
    """The same idempotency key came with another body."""

    def __init__(self, index: int, key: str):
        super().__init__(f"idempotency_key {key!r} was used with another body")
        self.index = index
        self.key = key


def post(
    connection: Connection, project: str, rewards: Sequence[NewReward]
) -> tuple[list[StoredReward], bool]:
    """Store rewards; returns them as stored, and whether any of them is new.

    Raises:
        UnknownTarget, IdempotencyConflict: nothing is stored.
    """
    # Of a list that fails at its third item nothing may stay: the transaction is shared with
    # other writes, so it gets a savepoint of its own.
    with connection.begin_nested():
        stored, fresh = [], False
        for index, reward in enumerate(rewards):
            record, created = _post(connection, project, index, reward)
            stored.append(record)
            fresh |= created
        return stored, fresh


def _post(
    connection: Connection, project: str, index: int, reward: NewReward
) -> tuple[StoredReward, bool]:
    trajectory_id = _target(connection, project, index, reward)
    digest = codec.digest_json(
        [
            reward.reward,
            reward.name,
            reward.completion_id,
            reward.choice,
            reward.trajectory_id,
            reward.comment,
            reward.metadata,
        ]
    )
    if reward.idempotency_key is not None:
        earlier = _earlier(connection, project, reward)
        if earlier is not None:
            return _repeat(earlier, index, reward, digest), False
    row = {
        "id": reward.id,
        "project": project,
        "trajectory_id": trajectory_id,
        "completion_id": reward.completion_id,
        "choice": reward.choice,
        "name": reward.name,
        "reward": reward.reward,
        "comment": reward.comment,
        "details": reward.metadata,
        "source": reward.source,
        "idempotency_key": reward.idempotency_key,
        "body_digest": digest,
        "created_at": reward.created_at,
    }
    insert: Any = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    statement = insert(Reward).values(row).on_conflict_do_nothing().returning(Reward.__table__)
    stored = connection.execute(statement).mappings().one_or_none()
    if stored is None:
        # Stored by an attempt whose end was not seen, or by another gateway at this moment.
        earlier = _earlier(connection, project, reward)
        assert earlier is not None
        return _repeat(earlier, index, reward, digest), False
    target = (reward.completion_id, reward.choice)
    if is_news(
        connection, project, trajectory_id, target, reward.name, reward.reward, stored["row"]
    ):
        reward_changed(connection, project, trajectory_id, time.time())
    return reward_of(stored), True


def _earlier(connection: Connection, project: str, reward: NewReward) -> RowMapping | None:
    same: ColumnElement[bool] = Reward.id == reward.id
    if reward.idempotency_key is not None:
        key = and_(Reward.project == project, Reward.idempotency_key == reward.idempotency_key)
        same = or_(same, key)
    return connection.execute(select(Reward.__table__).where(same)).mappings().first()


def _repeat(earlier: RowMapping, index: int, reward: NewReward, digest: bytes) -> StoredReward:
    if earlier["body_digest"] != digest:
        raise IdempotencyConflict(index, str(reward.idempotency_key))
    return reward_of(earlier)


def _target(connection: Connection, project: str, index: int, reward: NewReward) -> str:
    if reward.completion_id is None:
        assert reward.trajectory_id is not None
        query = select(Trajectory.id).where(
            Trajectory.project == project, Trajectory.id == reward.trajectory_id
        )
        if connection.execute(query).first() is None:
            raise UnknownTarget(index, "trajectory_id", reward.trajectory_id)
        return reward.trajectory_id
    found = connection.execute(
        select(Completion.trajectory_id).where(
            Completion.project == project, Completion.id == reward.completion_id
        )
    ).scalar_one_or_none()
    if found is None:
        raise UnknownTarget(index, "completion_id", reward.completion_id)
    if reward.choice is not None:
        choice = select(Choice.index).where(
            Choice.completion_id == reward.completion_id, Choice.index == reward.choice
        )
        if connection.execute(choice).first() is None:
            raise UnknownTarget(index, "choice", str(reward.choice))
    return found


def known_targets(connection: Connection, lists: Sequence[RewardList]) -> list[bool]:
    """For each list whether all of its completions and trajectories are there; PostgreSQL only."""

    def known(ids: set[str], project: Any, column: Any) -> set[tuple[str, str]]:
        # One array is one parameter, however many ids are in it.
        query = select(project, column).where(column == any_(literal(list(ids), ARRAY(Text))))
        return {(row[0], row[1]) for row in connection.execute(query)}

    targets = [
        [(each.project, r.completion_id, r.trajectory_id) for r in each.rewards] for each in lists
    ]
    completions = {c for of_list in targets for _, c, _ in of_list if c is not None}
    trajectories = {t for of_list in targets for _, _, t in of_list if t is not None}
    known_completions = known(completions, Completion.project, Completion.id)
    known_trajectories = known(trajectories, Trajectory.project, Trajectory.id)
    return [
        all((p, c) in known_completions or (p, t) in known_trajectories for p, c, t in of_list)
        for of_list in targets
    ]
