"""What only one process may do at a time, across all that share the database."""

import os
import secrets
import socket

from sqlalchemy import Connection, delete, or_, select

from gateway.store.base import insert_into
from gateway.store.tracing_models import Lease


def new_owner() -> str:
    """A name for this process: host, process id, and something that no other has."""
    return f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"


def take(connection: Connection, name: str, owner: str, seconds: float, now: float) -> bool:
    """Take or renew a lease; False while another holds it.

    The lease of a process of this machine that is dead is free at once.
    """
    held = connection.execute(select(Lease.owner).where(Lease.name == name)).scalar_one_or_none()
    free = or_(Lease.owner == owner, Lease.expires < now)
    if held is not None and held != owner and _dead(held):
        free = or_(free, Lease.owner == held)
    statement = insert_into(connection, Lease).values(name=name, owner=owner, expires=now + seconds)
    changed = connection.execute(
        statement.on_conflict_do_update(
            index_elements=["name"],
            set_={"owner": owner, "expires": now + seconds},
            where=free,
        ).returning(Lease.name)
    )
    return changed.first() is not None


def give_back(connection: Connection, name: str, owner: str) -> None:
    """Let the next one have it at once."""
    connection.execute(delete(Lease).where(Lease.name == name, Lease.owner == owner))


def _dead(owner: str) -> bool:
    host, _, rest = owner.partition("/")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
