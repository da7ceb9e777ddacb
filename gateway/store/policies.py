"""Creating policies, and moving what they serve. Each function is one write."""

import time
from typing import Any

from sqlalchemy import Connection, insert, select, update

from gateway.store.models import Event, Policy, Version
from gateway.store.policy_settings import Lora, PolicySettings


def create(
    connection: Connection,
    project: str,
    name: str,
    *,
    base_model: str,
    base_served: str,
    lora: Lora,
    settings: PolicySettings,
    adapter_path: str | None,
    base_digest: str | None = None,
) -> bool:
    """Create a policy with its version 0; False if there is one of that name."""
    if connection.execute(
        select(Policy.name).where(Policy.project == project, Policy.name == name)
    ).first():
        return False
    now = time.time()
    connection.execute(
        insert(Policy).values(
            project=project,
            name=name,
            base_model=base_model,
            base_served=base_served,
            alias=0,
            head=0,
            state="active",
            lora=lora.model_dump(),
            settings=settings.model_dump(),
            base_digest=base_digest,
            created_at=now,
        )
    )
    connection.execute(
        insert(Version).values(
            project=project,
            policy=name,
            number=0,
            parent=None,
            state="serving",
            adapter_path=adapter_path,
            probe=None,
            probe_result=None,
            step_id=None,
            created_at=now,
            published_at=now,
        )
    )
    return True


def configure(connection: Connection, project: str, name: str, settings: PolicySettings) -> None:
    """Replace a policy's settings."""
    connection.execute(
        update(Policy)
        .where(Policy.project == project, Policy.name == name)
        .values(settings=settings.model_dump())
    )


def published(
    connection: Connection, project: str, name: str, number: int, result: dict[str, Any]
) -> bool:
    """A version passed its probe everywhere: it serves, and the alias moves to it.

    False, and nothing changes, if a rollback superseded it in the meantime.
    """
    now = time.time()
    moved = connection.execute(
        update(Version)
        .where(*_version(project, name, number), Version.state == "ready")
        .values(state="serving", probe_result=result, published_at=now)
    ).rowcount
    if not moved:
        return False
    connection.execute(
        update(Policy).where(Policy.project == project, Policy.name == name).values(alias=number)
    )
    event(connection, project, name, "published", number, result)
    return True


def failed(
    connection: Connection, project: str, name: str, number: int, result: dict[str, Any]
) -> None:
    """A version did not pass: the alias stays, and training goes on from what is served."""
    moved = connection.execute(
        update(Version)
        .where(*_version(project, name, number), Version.state == "ready")
        .values(state="failed", probe_result=result, ended_at=time.time())
    ).rowcount
    if not moved:
        return
    connection.execute(
        update(Policy)
        .where(Policy.project == project, Policy.name == name, Policy.head == number)
        .values(head=Policy.alias)
    )
    event(connection, project, name, "failed", number, result)


def retired(connection: Connection, project: str, name: str, number: int) -> None:
    """A version was unloaded everywhere."""
    connection.execute(
        update(Version)
        .where(*_version(project, name, number), Version.state == "serving")
        .values(state="retired", ended_at=time.time())
    )


def rolled_back(connection: Connection, project: str, name: str, number: int) -> None:
    """Serve an earlier version now, and let training go on from it.

    Versions that wait for their probe are superseded: they grew from what is being left. A trial
    ends.
    """
    supersede_waiting(connection, project, name)
    connection.execute(
        update(Version)
        .where(Version.project == project, Version.policy == name, Version.state == "trial")
        .values(state="serving")
    )
    connection.execute(
        update(Version)
        .where(*_version(project, name, number))
        .values(state="serving", ended_at=None)
    )
    before = connection.execute(
        select(Policy.alias).where(Policy.project == project, Policy.name == name)
    ).scalar_one()
    connection.execute(
        update(Policy)
        .where(Policy.project == project, Policy.name == name)
        .values(alias=number, head=number, canary=None, canary_since=None)
    )
    event(connection, project, name, "rolled_back", number, {"from": before})


def supersede_waiting(connection: Connection, project: str, name: str) -> None:
    """Versions that wait for their probe grew from what is being left: they are never served."""
    connection.execute(
        update(Version)
        .where(Version.project == project, Version.policy == name, Version.state == "ready")
        .values(state="superseded", ended_at=time.time())
    )


def _version(project: str, name: str, number: int) -> tuple[Any, ...]:
    return Version.project == project, Version.policy == name, Version.number == number


def event(
    connection: Connection,
    project: str,
    name: str,
    kind: str,
    number: int | None,
    detail: dict[str, Any],
) -> None:
    """Record that something happened to a policy."""
    connection.execute(
        insert(Event).values(
            project=project, policy=name, kind=kind, version=number, detail=detail, at=time.time()
        )
    )
