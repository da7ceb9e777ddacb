"""Keys: made once and shown once; the database has only their digests."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import Connection, Index, func, insert, select, update
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.ids import new_id
from gateway.store.models import Base

SCOPES = ("inference", "reward", "read", "admin")
PREFIX = "sk-strop-"


class ApiKey(Base):
    """A key of a project; only its digest is kept."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str]
    name: Mapped[str]
    digest: Mapped[bytes] = mapped_column(unique=True)
    scopes: Mapped[str]
    """Comma-separated: `inference`, `reward`, `read`, `admin`."""
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]

    __table_args__ = (Index("ix_api_keys_project", "project"),)


@dataclass(frozen=True, slots=True)
class Key:
    """What a key allows."""

    id: str
    project: str
    name: str
    scopes: frozenset[str]
    created_at: float
    revoked_at: float | None = None


def digest(secret: str) -> bytes:
    """What is stored of a key. It has 256 random bits, so a plain hash cannot be searched."""
    return sha256(secret.encode()).digest()


def create(
    connection: Connection, project: str, name: str, scopes: Sequence[str]
) -> tuple[Key, str]:
    """A new key, and its secret, which is not to be had again.

    Raises:
        ValueError: an unknown scope, or none.
    """
    unknown = set(scopes) - set(SCOPES)
    if unknown or not scopes:
        raise ValueError(
            f"unknown scope {sorted(unknown)[0]!r}; there are {', '.join(SCOPES)}"
            if unknown
            else f"a key needs at least one of the scopes {', '.join(SCOPES)}"
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    row: dict[str, Any] = {
        "id": new_id("key-"),
        "project": project,
        "name": name,
        "digest": digest(secret),
        "scopes": ",".join(sorted(set(scopes))),
        "created_at": time.time(),
        "revoked_at": None,
    }
    connection.execute(insert(ApiKey).values(row))
    key = Key(row["id"], project, name, frozenset(scopes), row["created_at"])
    return key, secret


def find(connection: Connection, secret_digest: bytes) -> Key | None:
    """The key of a digest, unless it is revoked."""
    query = select(ApiKey.__table__).where(
        ApiKey.digest == secret_digest, ApiKey.revoked_at.is_(None)
    )
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return None
    scopes = frozenset(row["scopes"].split(","))
    return Key(row["id"], row["project"], row["name"], scopes, row["created_at"])


def listing(connection: Connection) -> list[Key]:
    """All keys, oldest first, the revoked ones among them."""
    return [
        Key(
            row["id"],
            row["project"],
            row["name"],
            frozenset(row["scopes"].split(",")),
            row["created_at"],
            row["revoked_at"],
        )
        for row in connection.execute(
            select(ApiKey.__table__).order_by(ApiKey.created_at)
        ).mappings()
    ]


def any_exist(connection: Connection) -> bool:
    """Whether a key was ever made; from then on one is needed."""
    return bool(connection.execute(select(func.count()).select_from(ApiKey)).scalar_one())


def revoke(connection: Connection, key_id: str) -> bool:
    """Make a key worthless; False if there is none such."""
    query = (
        update(ApiKey)
        .where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
        .values(revoked_at=time.time())
    )
    return connection.execute(query).rowcount == 1
