"""What the classes of all tables share."""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    Text,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase

DEFAULT_PROJECT = "default"

_Json = JSON().with_variant(JSONB(), "postgresql")
RowId = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """Maps Python annotations to column types that SQLite and PostgreSQL share."""

    type_annotation_map = {  # noqa: RUF012
        str: Text,
        float: Double,
        bytes: LargeBinary,
        dict[str, Any]: _Json,
    }


def insert_into(connection: Connection, table: type[Base]) -> Any:
    """An insert that can say what becomes of a row that is there: each database has its own."""
    dialect: Any = sqlite if connection.dialect.name == "sqlite" else postgresql
    return dialect.insert(table)


def only_where(index: Index, condition: str) -> Index:
    """An index of those rows alone that a condition holds for."""
    for dialect in ("sqlite", "postgresql"):
        index.dialect_options[dialect]["where"] = text(condition)
    return index
