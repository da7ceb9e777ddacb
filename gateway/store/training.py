"""What the trainer writes to the database: steps, what they used, and new versions.

Every function runs in a transaction of its own. All of them may be called again after a crash.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, insert, or_, select, update

from gateway.store import outbox, trials, waiting
from gateway.store.claims import ClaimedGroup, TrainablePolicy, held_by, release
from gateway.store.database import Database
from gateway.store.models import CompletionUse, Event, Group, Policy, Step, Version
from gateway.store.records import Json
from gateway.store.revisions import settle


class Superseded(Exception):
    """A rollback or another trainer moved the policy on while the step ran."""


@dataclass(slots=True)
class Use:
    """What a step made of one choice of a completion."""

    completion_id: str
    choice: int
    trajectory_id: str
    group_id: str
    reward: float | None
    advantage: float | None
    tokens: int
    reason: str | None
    revision: int = 0
    """Of the trajectory's rewards."""
    baseline: float | None = None
    """What the reward was compared with."""
    ratio: float | None = None
    """Mean importance weight of its tokens."""


@dataclass(slots=True)
class Outcome:
    """What became of a trajectory: `reason` None means that the step trained on it."""

    trajectory_id: str
    reason: str | None
    revision: int | None = None
    """Of its rewards as they were read; if they have changed since, it waits again."""
    score: float | None = None
    """What the running baselines learn from it; None where they have learned from it before."""
    task: str | None = None
    """Whose running baseline learns too; None for the policy's alone."""


def skip_groups(
    database: Database,
    groups: Sequence[ClaimedGroup],
    worker: str,
    outcomes: Sequence[Outcome],
    uses: Sequence[Use],
) -> None:
    """Record that claimed groups had nothing to teach, each trajectory with its reason."""
    with database.write() as connection:
        first = groups[0]
        waiting.hold(connection, [(g.project, g.policy, g.id) for g in groups])
        _settle(connection, first.project, first.policy, None, outcomes, uses)
        release(connection, groups, worker)


def begin_step(database: Database, policy: TrainablePolicy, worker: str, config: Json) -> int:
    """Record that a step began; returns its id.

    Steps of the policy that a killed trainer left running are recorded as failed.
    """
    with database.write() as connection:
        _fail_abandoned(connection, policy)
        return int(
            connection.execute(
                insert(Step)
                .values(
                    project=policy.project,
                    policy=policy.name,
                    parent_version=policy.head,
                    version=None,
                    state="running",
                    worker=worker,
                    config=config,
                    metrics=None,
                    error=None,
                    started_at=time.time(),
                    finished_at=None,
                )
                .returning(Step.id)
            ).scalar_one()
        )


def _fail_abandoned(connection: Connection, policy: TrainablePolicy) -> None:
    # A trainer that still works on a step holds its groups.
    now = time.time()
    alive = select(Group.lease_owner).where(
        Group.project == policy.project,
        Group.policy == policy.name,
        Group.lease_owner.is_not(None),
        Group.lease_expires > now,
    )
    connection.execute(
        update(Step)
        .where(
            Step.project == policy.project,
            Step.policy == policy.name,
            Step.state == "running",
            Step.worker.not_in(alive),
        )
        .values(state="failed", error="the trainer died while the step ran", finished_at=now)
    )


def next_version(database: Database, policy: TrainablePolicy) -> int:
    """The number that the next version of a policy gets: one that no version ever had."""
    with database.read() as connection:
        newest = connection.execute(
            select(func.max(Version.number)).where(
                Version.project == policy.project, Version.policy == policy.name
            )
        ).scalar_one()
    return int(newest or 0) + 1


def finish_step(
    database: Database,
    policy: TrainablePolicy,
    step_id: int,
    worker: str,
    *,
    number: int,
    adapter_path: Path,
    probe: Json,
    metrics: Json,
    groups: Sequence[ClaimedGroup],
    outcomes: Sequence[Outcome],
    uses: Sequence[Use],
) -> None:
    """Record a finished step and its version, all or nothing.

    Raises:
        Superseded: the policy's head is no longer the version that the step began from, or a
            lease was lost. The step is marked so; its groups wait again.
    """
    try:
        with database.write() as connection:
            _hold_all(connection, policy, groups, worker, number)
            now = time.time()
            connection.execute(
                insert(Version).values(
                    project=policy.project,
                    policy=policy.name,
                    number=number,
                    parent=policy.head,
                    state="ready",
                    adapter_path=str(adapter_path),
                    probe=probe,
                    probe_result=None,
                    step_id=step_id,
                    created_at=now,
                    published_at=None,
                )
            )
            connection.execute(
                update(Step)
                .where(Step.id == step_id)
                .values(state="done", version=number, metrics=metrics, finished_at=now)
            )
            _settle(connection, policy.project, policy.name, step_id, outcomes, uses)
            release(connection, groups, worker)
    except Superseded as lost:
        fail_step(database, policy, step_id, worker, groups, str(lost), "superseded")
        raise


def _hold_all(
    connection: Connection,
    policy: TrainablePolicy,
    groups: Sequence[ClaimedGroup],
    worker: str,
    number: int,
) -> None:
    moved = connection.execute(
        update(Policy)
        .where(
            Policy.project == policy.project,
            Policy.name == policy.name,
            Policy.head == policy.head,
            or_(Policy.lease_owner.is_(None), Policy.lease_owner == worker),
        )
        .values(head=number, strikes=0)
    ).rowcount
    if not moved:
        raise Superseded(
            f"{policy.name} was moved away from @{policy.head}, or taken over by another trainer, "
            "while the step ran"
        )
    for group in sorted(groups, key=lambda group: group.id):
        held = select(Group.id).where(*held_by(group, worker)).with_for_update()
        if connection.execute(held).first() is None:
            raise Superseded(f"the lease on group {group.id} ran out while the step ran")
        connection.execute(
            update(Group)
            .where(*held_by(group, worker), Group.strikes > 0)
            .values(strikes=0, reason=None)
        )


def fail_step(
    database: Database,
    policy: TrainablePolicy,
    step_id: int,
    worker: str,
    groups: Sequence[ClaimedGroup],
    error: str,
    state: str = "failed",
    *,
    reason: str | None = None,
    pause_after: int | None = None,
) -> None:
    """Record that a step came to nothing, and give its groups back.

    Args:
        reason: kind of the error.
        pause_after: the step was undone for numbers that are not finite: its groups are marked with
            the reason and come last, and after so many steps in a row the policy is paused.
    """
    with database.write() as connection:
        now = time.time()
        connection.execute(
            update(Step)
            # Only one that is not over: a connection that broke after its commit looks like a
            # failure, and is none.
            .where(Step.id == step_id, Step.state == "running")
            .values(state=state, error=error, reason=reason, finished_at=now)
        )
        connection.execute(
            insert(Event).values(
                project=policy.project,
                policy=policy.name,
                kind=f"step_{state}",
                version=None,
                detail={"step": step_id, "error": error, "reason": reason},
                at=now,
            )
        )
        if pause_after is not None:
            _strike(connection, policy, worker, groups, reason, error, pause_after)
        release(connection, groups, worker)


def _strike(
    connection: Connection,
    policy: TrainablePolicy,
    worker: str,
    groups: Sequence[ClaimedGroup],
    reason: str | None,
    error: str,
    pause_after: int,
) -> None:
    for group in groups:
        connection.execute(
            update(Group)
            .where(*held_by(group, worker))
            .values(strikes=Group.strikes + 1, reason=reason)
        )
    strikes = connection.execute(
        update(Policy)
        .where(Policy.project == policy.project, Policy.name == policy.name)
        .values(strikes=Policy.strikes + 1)
        .returning(Policy.strikes)
    ).scalar_one()
    if strikes >= pause_after:
        trials.paused(
            connection,
            policy.project,
            policy.name,
            f"{strikes} steps in a row were undone, the last because of this: {error} Lower "
            f"training.learning_rate, then resume the policy (strop policy resume {policy.name}).",
        )


def _settle(
    connection: Connection,
    project: str,
    policy: str,
    step_id: int | None,
    outcomes: Sequence[Outcome],
    uses: Sequence[Use],
) -> None:
    settle(connection, project, policy, step_id, outcomes)
    if uses:
        ids = [use.completion_id for use in uses]
        outbox.add_where_traced(connection, project, ids, time.time())
        connection.execute(
            insert(CompletionUse),
            [
                {
                    "step_id": step_id,
                    "completion_id": use.completion_id,
                    "choice": use.choice,
                    "trajectory_id": use.trajectory_id,
                    "group_id": use.group_id,
                    "reward": use.reward,
                    "advantage": use.advantage,
                    "tokens": use.tokens,
                    "reason": use.reason,
                    "revision": use.revision,
                    "baseline": use.baseline,
                    "ratio": use.ratio,
                }
                for use in uses
            ],
        )
