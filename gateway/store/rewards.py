"""Posting rewards: all or nothing, once per idempotency key."""

import time
from collections.abc import Sequence

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    and_,
    or_,
    select,
)

from gateway.store import choices, codec, waiting
from gateway.store.base import insert_into
from gateway.store.models import Reward
from gateway.store.queries import reward_of
from gateway.store.records import StoredReward
from gateway.store.revisions import is_news, reward_changed
from gateway.store.targets import NewReward as NewReward
from gateway.store.targets import RewardList as RewardList
from gateway.store.targets import Targets, targets_of


class RewardRefused(Exception):
    """Rewards that cannot be stored; what else is written with them can."""


class UnknownTarget(RewardRefused):
    """A reward names something that is not in the database; `param` says which field."""

    def __init__(self, index: int, param: str, name: str):
        super().__init__(f"{param} {name!r} is not known")
        self.index = index
        self.param = param
        self.name = name

    def __reduce__(self) -> tuple[type, tuple[int, str, str]]:
        return type(self), (self.index, self.param, self.name)


class IdempotencyConflict(RewardRefused):
    """The same idempotency key came with another body."""

    def __init__(self, index: int, key: str):
        super().__init__(f"idempotency_key {key!r} was used with another body")
        self.index = index
        self.key = key

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.index, self.key)


Posted = tuple[list[StoredReward], bool]
"""Rewards as they are stored, and whether any of them is new."""


def post(connection: Connection, project: str, rewards: Sequence[NewReward]) -> Posted:
    """Store rewards.

    Raises:
        UnknownTarget, IdempotencyConflict: nothing is stored.
    """
    (result,) = post_lists(connection, [RewardList(project, rewards)])
    if isinstance(result, RewardRefused):
        raise result
    return result


def post_lists(connection: Connection, lists: Sequence[RewardList]) -> list[Posted | RewardRefused]:
    """Store lists of rewards, each all or nothing; a list that is refused has its refusal here."""
    targets = targets_of(connection, lists)
    waiting.hold(connection, targets.groups())
    changed: set[tuple[str, str]] = set()
    results: list[Posted | RewardRefused] = []
    for each in lists:
        try:
            # Of a list that fails at its third item nothing may stay: the transaction is shared
            # with other writes, so it gets a savepoint of its own.
            with connection.begin_nested():
                results.append(_post_list(connection, each, targets, changed))
        except RewardRefused as refusal:
            results.append(refusal)
    by_choice = {
        reward.completion_id
        for each in lists
        for reward in each.rewards
        if reward.choice is not None and reward.completion_id is not None
    }
    if by_choice:
        choices.set_apart(connection, by_choice)
    waiting.recount(connection, changed, targets.groups())
    return results


def _post_list(
    connection: Connection, posted: RewardList, targets: Targets, changed: set[tuple[str, str]]
) -> Posted:
    stored, fresh = [], False
    for index, reward in enumerate(posted.rewards):
        trajectory_id = _target(targets, posted.project, index, reward)
        record, touched = _post(connection, posted.project, index, reward, trajectory_id)
        changed.update((posted.project, id) for id in touched or ())
        created = touched is not None
        stored.append(record)
        fresh |= created
    return stored, fresh


def _target(targets: Targets, project: str, index: int, reward: NewReward) -> str:
    if reward.completion_id is None:
        assert reward.trajectory_id is not None
        if (project, reward.trajectory_id) not in targets.trajectories:
            raise UnknownTarget(index, "trajectory_id", reward.trajectory_id)
        return reward.trajectory_id
    found = targets.completions.get((project, reward.completion_id))
    if found is None:
        raise UnknownTarget(index, "completion_id", reward.completion_id)
    if reward.choice is not None and (reward.completion_id, reward.choice) not in targets.choices:
        raise UnknownTarget(index, "choice", str(reward.choice))
    return found


def _post(
    connection: Connection, project: str, index: int, reward: NewReward, trajectory_id: str
) -> tuple[StoredReward, set[str] | None]:
    """The reward, and the trajectories for which something has changed; None: it was there."""
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
            return _repeat(earlier, index, reward, digest), None
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
    insert = insert_into(connection, Reward)
    statement = insert.values(row).on_conflict_do_nothing().returning(Reward.__table__)
    stored = connection.execute(statement).mappings().one_or_none()
    if stored is None:
        # Stored by an attempt whose end was not seen, or by another gateway at this moment.
        earlier = _earlier(connection, project, reward)
        assert earlier is not None
        return _repeat(earlier, index, reward, digest), None
    target = (reward.completion_id, reward.choice)
    if is_news(
        connection, project, trajectory_id, target, reward.name, reward.reward, stored["row"]
    ):
        return reward_of(stored), reward_changed(connection, project, trajectory_id, time.time())
    return reward_of(stored), set()


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
