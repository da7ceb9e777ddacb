"""The tables behind tracing and judging: what is to be sent, what came back, who does it."""

from typing import Any

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.models import Base, RowId


class Lease(Base):
    """Who does something that only one process may do at a time."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    expires: Mapped[float]


class OutboxEntry(Base):
    """Something that Langfuse does not know yet, written in the transaction that made it so.

    It says what changed, not how: what is sent is read when it is sent. A row is deleted when
    Langfuse has accepted it.
    """

    __tablename__ = "langfuse_outbox"

    row: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    project: Mapped[str]
    kind: Mapped[str]
    """`completion` or `reward`."""
    ref: Mapped[str]
    """The id of either."""
    at: Mapped[float]
    error: Mapped[str | None]
    """Why Langfuse refused it; it is not sent again by itself."""

    __table_args__ = (Index("ix_langfuse_outbox_project", "project", "row"),)


class LangfuseTrace(Base):
    """Which trajectories were sent into which trace: the way back from a score."""

    __tablename__ = "langfuse_traces"

    project: Mapped[str] = mapped_column(primary_key=True)
    trace_id: Mapped[str] = mapped_column(primary_key=True)
    trajectory_id: Mapped[str] = mapped_column(primary_key=True)


class LangfuseCursor(Base):
    """How far the scores of a project's Langfuse have been read."""

    __tablename__ = "langfuse_cursors"

    project: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[float]
    """Newest timestamp of a score that was read."""
    compared_at: Mapped[float]
    """When all scores were last compared with what is known of them."""


class LangfuseScore(Base):
    """A score of Langfuse's that was read, and the reward that it is now."""

    __tablename__ = "langfuse_scores"

    project: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[bytes]
    """Of its value and comment: another one is an edit."""
    reward_id: Mapped[str | None]
    """Null where it belongs to nothing here, or has no place on the scale."""
    at: Mapped[float]
    """Its timestamp in Langfuse."""

    __table_args__ = (Index("ix_langfuse_scores_at", "project", "at"),)


class JudgeCall(Base):
    """One question to a judge, its answer and its cost."""

    __tablename__ = "judge_calls"

    row: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    project: Mapped[str]
    policy: Mapped[str]
    group_id: Mapped[str]
    key: Mapped[bytes]
    """Digest of the judge and of all that it was shown."""
    answer: Mapped[dict[str, Any] | None]
    error: Mapped[str | None]
    cost: Mapped[float]
    """US dollars."""
    at: Mapped[float]

    __table_args__ = (
        Index("ix_judge_calls_key", "key"),
        Index("ix_judge_calls_policy", "project", "policy", "at"),
    )


class JudgedGroup(Base):
    """How far the judging of a group has come."""

    __tablename__ = "judged_groups"

    project: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str] = mapped_column(primary_key=True)
    digest: Mapped[bytes]
    """Of the members that were judged: with others it is judged anew."""
    state: Mapped[str]
    """`done`, `waiting` (to be tried again) or `failed`."""
    attempts: Mapped[int]
    not_before: Mapped[float]
    error: Mapped[str | None]
