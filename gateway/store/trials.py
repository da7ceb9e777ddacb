"""Moving a policy's versions on what they earned: trials, promotions, withdrawals, forks, pauses.

Each function is one write, a part of a larger transaction, and does nothing where another gateway
was faster: the conditions are in the statements, so any number of gateways may try.
"""

import time
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from gateway.store.models import Event, Policy, Version
from gateway.store.policies import event, supersede_waiting

Json = dict[str, Any]


def on_trial(
    connection: Connection, project: str, name: str, number: int, result: Json, share: float
) -> bool:
    """A version passed its probe: it serves a share of the new trajectories from now on.

    False, and nothing changes, if it waits no more, or another version is on trial.
    """
    now = time.time()
    taken = connection.execute(
        update(Policy)
        .where(
            *_policy(project, name), Policy.canary.is_(None), _state(project, name, number, "ready")
        )
        .values(canary=number, canary_since=now)
    ).rowcount
    if not taken:
        return False
    connection.execute(
        update(Version)
        .where(*_version(project, name, number))
        .values(state="trial", probe_result=result, published_at=now)
    )
    words = f"{name}@{number} serves {share:.0%} of the new trajectories, on trial"
    event(connection, project, name, "trial_began", number, {"why": words, "share": share})
    return True


def looked(
    connection: Connection, project: str, name: str, number: int, looks: int, found: Json
) -> bool:
    """Record look number `looks + 1` at a version; False if it was taken by somebody else."""
    return bool(
        connection.execute(
            update(Version)
            .where(*_version(project, name, number), Version.looks == looks)
            .values(looks=looks + 1, looked=found)
        ).rowcount
    )


def promoted(
    connection: Connection, project: str, name: str, number: int, why: str, detail: Json
) -> bool:
    """The version on trial serves everybody; False if it is not on trial (any more)."""
    moved = connection.execute(
        update(Policy)
        .where(*_policy(project, name), Policy.canary == number)
        .values(canary=None, canary_since=None, alias=number)
    ).rowcount
    if not moved:
        return False
    connection.execute(
        update(Version).where(*_version(project, name, number)).values(state="serving")
    )
    event(connection, project, name, "promoted", number, {"why": why, **detail})
    return True


def dropped(
    connection: Connection,
    project: str,
    name: str,
    number: int,
    why: str,
    detail: Json,
    rate_factor: float = 1.0,
) -> bool:
    """The version on trial serves nobody any more, and training goes on from the alias.

    Args:
        rate_factor: what the learning rate is multiplied with.
    """
    alias = _alias(connection, project, name)
    moved = connection.execute(
        update(Policy)
        .where(*_policy(project, name), Policy.canary == number)
        .values(
            canary=None,
            canary_since=None,
            head=Policy.alias,
            rate_factor=Policy.rate_factor * rate_factor,
        )
    ).rowcount
    if not moved:
        return False
    supersede_waiting(connection, project, name)
    # `serving` until the publisher has unloaded it: trajectories that began with it go on.
    connection.execute(
        update(Version).where(*_version(project, name, number)).values(state="serving")
    )
    detail = {"why": why, "to": alias, **detail}
    event(connection, project, name, "dropped", number, detail)
    return True


def withdrawn(
    connection: Connection,
    project: str,
    name: str,
    number: int,
    to: int,
    why: str,
    detail: Json,
    rate_factor: float,
) -> bool:
    """Take the alias from a version that was found worse; training goes on from version `to`."""
    moved = connection.execute(
        update(Policy)
        .where(*_policy(project, name), Policy.alias == number, Policy.canary.is_(None))
        .values(alias=to, head=to, rate_factor=Policy.rate_factor * rate_factor)
    ).rowcount
    if not moved:
        return False
    supersede_waiting(connection, project, name)
    connection.execute(
        update(Version).where(*_version(project, name, to)).values(state="serving", ended_at=None)
    )
    event(connection, project, name, "withdrawn", number, {"why": why, "to": to, **detail})
    return True


def paused(connection: Connection, project: str, name: str, why: str) -> bool:
    """No step is taken any more; False if the policy is paused already."""
    moved = connection.execute(
        update(Policy)
        .where(*_policy(project, name), Policy.state == "active")
        .values(state="paused", state_reason=why)
    ).rowcount
    if moved:
        event(connection, project, name, "paused", None, {"why": why})
    return bool(moved)


def resumed(connection: Connection, project: str, name: str, rate_factor: float | None) -> bool:
    """Steps are taken again; False if the policy is not paused.

    Args:
        rate_factor: what the settings' learning rate is multiplied with from now on; None leaves
            it as it is. It is set in an active policy too.
    """
    values: Json = {} if rate_factor is None else {"rate_factor": rate_factor}
    moved = connection.execute(
        update(Policy)
        .where(*_policy(project, name), Policy.state == "paused")
        .values(state="active", state_reason=None, strikes=0, **values)
    ).rowcount
    if moved:
        event(connection, project, name, "resumed", None, values)
    elif values:
        connection.execute(update(Policy).where(*_policy(project, name)).values(values))
    return bool(moved)


def forked(
    connection: Connection, project: str, name: str, number: int, new: str, adapter_path: str | None
) -> bool:
    """A new policy whose version 0 is a version of another; False if there is one of that name."""
    taken = connection.execute(select(func.count()).where(*_policy(project, new))).scalar_one()
    source = (
        connection.execute(select(Policy.__table__).where(*_policy(project, name))).mappings().one()
    )
    if taken:
        return False
    now = time.time()
    same = ("base_model", "base_served", "lora", "settings", "base_digest", "rate_factor")
    connection.execute(
        insert(Policy).values(
            project=project,
            name=new,
            alias=0,
            head=0,
            state="active",
            created_at=now,
            forked_from=f"{name}@{number}",
            **{column: source[column] for column in same},
        )
    )
    connection.execute(
        insert(Version).values(
            project=project,
            policy=new,
            number=0,
            parent=None,
            state="serving",
            adapter_path=adapter_path,
            probe=_own_probe(connection, project, name, number),
            created_at=now,
            published_at=now,
        )
    )
    event(connection, project, new, "forked", 0, {"from": f"{name}@{number}"})
    return True


def _own_probe(connection: Connection, project: str, name: str, number: int) -> Json | None:
    probe = connection.execute(
        select(Version.probe).where(*_version(project, name, number))
    ).scalar_one()
    # The new policy has no version before it to be told from.
    return {k: v for k, v in probe.items() if k != "previous_logprobs"} if probe else None


def events(
    connection: Connection, project: str, name: str, limit: int, before: int | None = None
) -> list[Json]:
    """What happened to a policy, the newest first."""
    query = select(Event.__table__).where(Event.project == project, Event.policy == name)
    if before is not None:
        query = query.where(Event.id < before)
    query = query.order_by(Event.id.desc()).limit(limit)
    return [dict(row) for row in connection.execute(query).mappings()]


def _alias(connection: Connection, project: str, name: str) -> int:
    return int(connection.execute(select(Policy.alias).where(*_policy(project, name))).scalar_one())


def _state(project: str, name: str, number: int, state: str) -> Any:
    return (
        select(Version.number)
        .where(*_version(project, name, number), Version.state == state)
        .exists()
    )


def _policy(project: str, name: str) -> tuple[Any, ...]:
    return Policy.project == project, Policy.name == name


def _version(project: str, name: str, number: int) -> tuple[Any, ...]:
    return Version.project == project, Version.policy == name, Version.number == number
