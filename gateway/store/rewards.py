"""Posting rewards: all or nothing, once per idempotency key."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from gateway.store import codec
from gateway.store.ids import new_id
from gateway.store.models import Choice, Completion, Reward, Trajectory
from gateway.store.queries import reward_of
from gateway.store.records import StoredReward


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


class UnknownTarget(Exception):
    """A reward names something that is not in the database; `param` says which field."""

    def __init__(self, index: int, param: str, name: str):
        super().__init__(f"{param} {name!r} is not known")
        self.index = index
        self.param = param
        self.name = name


class IdempotencyConflict(Exception):
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
        query = select(Reward.__table__).where(
            Reward.project == project, Reward.idempotency_key == reward.idempotency_key
        )
        earlier = connection.execute(query).mappings().one_or_none()
        if earlier is not None:
            if earlier["body_digest"] != digest:
                raise IdempotencyConflict(index, reward.idempotency_key)
            return reward_of(earlier), False
    row = {
        "id": new_id("reward-"),
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
        "created_at": time.time(),
    }
    stored = connection.execute(insert(Reward).values(row).returning(Reward.__table__))
    record = reward_of(stored.mappings().one())
    _wake(connection, project, trajectory_id, record.created_at)
    return record, True


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


def _wake(connection: Connection, project: str, trajectory_id: str, now: float) -> None:
    where = (Trajectory.project == project, Trajectory.id == trajectory_id)
    connection.execute(update(Trajectory).where(*where).values(rewarded=True, updated_at=now))
    # One that was passed over for the want of a reward waits for training again.
    connection.execute(
        update(Trajectory)
        .where(*where, Trajectory.state == "skipped", Trajectory.reason == "no_reward")
        .values(state="open", reason=None)
    )
