"""The tables of the trajectory database, one class per word of the design.

Times are Unix seconds (UTC). Every row belongs to a project. Ids that a client may choose
(policies, trajectories, groups) are keys together with their project.
"""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from gateway.store.base import DEFAULT_PROJECT as DEFAULT_PROJECT
from gateway.store.base import Base as Base
from gateway.store.base import RowId as RowId
from gateway.store.base import only_where

_OPEN = "state = 'open' AND split = 'train'"


class Policy(Base):
    """A named model that is being trained."""

    __tablename__ = "policies"

    project: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str]
    """Folder or hub name of the base model, as vLLM and transformers take it."""
    base_served: Mapped[str]
    """The name under which vLLM serves the bare base model."""
    alias: Mapped[int] = mapped_column(default=0)
    """The version that the bare policy name serves now."""
    head: Mapped[int] = mapped_column(default=0)
    """The version that training goes on from."""
    state: Mapped[str] = mapped_column(default="active")
    """`active` or `paused`; a paused policy is served and not trained."""
    state_reason: Mapped[str | None]
    """Why it is paused, in words."""
    lora: Mapped[dict[str, Any]]
    """`rank`, `alpha`, `target_modules`."""
    settings: Mapped[dict[str, Any]]
    """Grouping, reward weights and training options, as in `strop.toml`."""
    created_at: Mapped[float]
    forked_from: Mapped[str | None]
    """`policy@N` whose adapter its version 0 is; null where version 0 is the base model."""
    base_digest: Mapped[str | None]
    """What the base model's files were when the policy began."""
    rate_factor: Mapped[float] = mapped_column(default=1.0, server_default="1")
    """The settings' learning rate is multiplied with it; the guard lowers it."""
    strikes: Mapped[int] = mapped_column(default=0, server_default="0")
    """Steps in a row that were undone because a number was not finite."""
    canary: Mapped[int | None]
    """The version on trial: it serves a share of the new trajectories."""
    canary_since: Mapped[float | None]
    lease_owner: Mapped[str | None]
    """The trainer that works on the policy; no other one may take a step."""
    lease_expires: Mapped[float | None]


class Version(Base):
    """One published, or to be published, state of a policy."""

    __tablename__ = "versions"

    project: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int | None]
    state: Mapped[str]
    """`ready` (written, not yet proven), `trial` (proven, and serving a share of the new
    trajectories), `serving` (proven on every replica), `retired` (unloaded), `failed` (did not pass
    its probe), `superseded` (a rollback came first)."""
    adapter_path: Mapped[str | None]
    """Folder of the adapter; null where version 0 is the base model under its own name."""
    probe: Mapped[dict[str, Any] | None]
    """`token_ids`, `logprobs` under this version, `previous_logprobs` under its parent."""
    probe_result: Mapped[dict[str, Any] | None]
    step_id: Mapped[int | None] = mapped_column(RowId)
    created_at: Mapped[float]
    published_at: Mapped[float | None]
    looks: Mapped[int] = mapped_column(default=0, server_default="0")
    """How often the guard has compared it with earlier versions."""
    looked: Mapped[dict[str, Any] | None]
    """What the last of these looks found."""
    ended_at: Mapped[float | None]
    """When it was taken out of service; its files may be deleted a while later."""
    deleted_at: Mapped[float | None]
    """When its files were deleted; it cannot be gone back to any more."""

    __table_args__ = (
        ForeignKeyConstraint(["project", "policy"], ["policies.project", "policies.name"]),
    )


class Group(Base):
    """Trajectories of one task, whose rewards are compared with each other."""

    __tablename__ = "groups"

    project: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    task: Mapped[str | None]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    closed_at: Mapped[float | None]
    lease_owner: Mapped[str | None]
    lease_expires: Mapped[float | None]
    strikes: Mapped[int] = mapped_column(server_default="0")
    """Steps with this group that were undone; it stands behind groups with fewer."""
    reason: Mapped[str | None]
    """Why the last of them was undone."""
    waiting: Mapped[int] = mapped_column(server_default="0")
    """Rewarded members (trajectories, or choices of one) that wait for training; never too low."""
    oldest_at: Mapped[float | None]
    """When the oldest trajectory that waits, rewarded or not, began; null only where none does."""
    choices: Mapped[int | None]
    """In a group of the choices of one completion how many there are; null for trajectories."""

    __table_args__ = (
        Index("ix_groups_policy_updated", "project", "policy", "updated_at"),
        only_where(Index("ix_groups_waiting", "project", "policy", "waiting"), "waiting > 0"),
        only_where(Index("ix_groups_oldest", "project", "policy", "oldest_at"), "waiting > 0"),
        only_where(
            Index("ix_groups_ended", "project", "policy", "oldest_at"),
            "(closed_at IS NOT NULL OR choices IS NOT NULL) AND oldest_at IS NOT NULL",
        ),
    )


class Trajectory(Base):
    """One episode of the agent."""

    __tablename__ = "trajectories"

    project: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    policy: Mapped[str]
    """The policy of its first completion, or the name of a model that is not trained."""
    group_id: Mapped[str]
    parent_id: Mapped[str | None]
    split: Mapped[str]
    """`train` or `eval`; `eval` is never trained on."""
    attribution: Mapped[str]
    """Which of the five ways of the design found it."""
    rewarded: Mapped[bool] = mapped_column(default=False)
    state: Mapped[str] = mapped_column(default="open")
    """`open`, `used` (a step trained on it) or `skipped` (with the reason)."""
    reason: Mapped[str | None]
    step_id: Mapped[int | None] = mapped_column(RowId)
    revision: Mapped[int] = mapped_column(server_default="0")
    """How often its rewards changed."""
    settled_revision: Mapped[int | None]
    """The revision that the trainer decided about last; null if it never did."""
    created_at: Mapped[float]
    updated_at: Mapped[float]

    __table_args__ = (
        Index("ix_trajectories_group", "project", "policy", "group_id"),
        only_where(
            Index(
                "ix_trajectories_open", "project", "policy", "group_id", "rewarded", "created_at"
            ),
            _OPEN,
        ),
        only_where(
            Index("ix_trajectories_revised", "project", "policy", "group_id"),
            f"{_OPEN} AND settled_revision IS NOT NULL",
        ),
        only_where(
            Index("ix_trajectories_lent", "project", "policy", "group_id", "created_at"),
            f"{_OPEN} AND parent_id IS NOT NULL",
        ),
        Index("ix_trajectories_parent", "project", "parent_id"),
        Index("ix_trajectories_created", "project", "created_at"),
    )


class Completion(Base):
    """One request to the model and its response.

    A completion that continues an earlier one of its trajectory stores only what is new:
    `messages` after the first `messages_shared`, `prompt_ids` after the first `prompt_shared`,
    and no `request` where it equals its parent's.
    """

    __tablename__ = "completions"

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str]
    trajectory_id: Mapped[str]
    parent_id: Mapped[str | None]
    parent_choice: Mapped[int | None]
    policy: Mapped[str]
    version: Mapped[int | None]
    served_model: Mapped[str | None]
    """What the replica said it answered with."""
    replica: Mapped[str | None]
    status: Mapped[str]
    """`complete`, `aborted` (the client or the upstream went away) or `error`."""
    http_status: Mapped[int]
    reason: Mapped[str | None]
    """Why it cannot be trained on; null if it can."""
    stream: Mapped[bool]
    request: Mapped[bytes | None]
    messages: Mapped[bytes]
    messages_shared: Mapped[int]
    messages_count: Mapped[int]
    messages_digest: Mapped[bytes]
    request_digest: Mapped[bytes]
    response: Mapped[bytes | None]
    prompt_ids: Mapped[bytes | None]
    prompt_shared: Mapped[int]
    prompt_digest: Mapped[bytes | None]
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    sampling: Mapped[dict[str, Any]]
    """Temperature and everything else that shaped the distribution sampled from."""
    client_metadata: Mapped[dict[str, Any] | None]
    created_at: Mapped[float]
    first_token_at: Mapped[float | None]
    finished_at: Mapped[float]
    traceparent: Mapped[str | None]
    """W3C trace context of the request, if it came with one."""

    __table_args__ = (
        ForeignKeyConstraint(
            ["project", "trajectory_id"],
            ["trajectories.project", "trajectories.id"],
            ondelete="CASCADE",
        ),
        Index("ix_completions_trajectory", "project", "trajectory_id", "created_at"),
        Index("ix_completions_created", "project", "created_at"),
        Index("ix_completions_policy", "project", "policy", "id"),
        Index("ix_completions_version", "project", "policy", "version", "id"),
        only_where(
            Index("ix_completions_failed", "project", "status", "id"), "status <> 'complete'"
        ),
        # SQLite has it in the next one.
        Index("ix_completions_project", "project", "id").ddl_if(dialect="postgresql"),
        # Any key of `client_metadata` may be asked for. PostgreSQL indexes them all; SQLite reads
        # this index instead of the rows, whose prompts and messages lie before the metadata.
        Index("ix_completions_metadata", "project", "id", "client_metadata").ddl_if(
            dialect="sqlite"
        ),
        Index(
            "ix_completions_metadata_keys",
            "client_metadata",
            postgresql_using="gin",
            postgresql_ops={"client_metadata": "jsonb_path_ops"},
        ).ddl_if(dialect="postgresql"),
    )


class Choice(Base):
    """One of the `n` answers of a completion, as it was sampled."""

    __tablename__ = "choices"

    completion_id: Mapped[str] = mapped_column(
        ForeignKey("completions.id", ondelete="CASCADE"), primary_key=True
    )
    index: Mapped[int] = mapped_column(primary_key=True)
    finish_reason: Mapped[str | None]
    token_ids: Mapped[bytes | None]
    logprobs: Mapped[bytes | None]
    sequence_digest: Mapped[bytes | None]
    """Digest of prompt and answer together: what a next turn's prompt must begin with."""
    thread_key: Mapped[bytes | None]
    """Digest of the normalised messages and answer: what a next request must begin with."""
    continued: Mapped[bool] = mapped_column(default=False)

    __table_args__ = (Index("ix_choices_thread", "thread_key"),)


class Reward(Base):
    """A number posted against a completion or a trajectory. Append-only: a correction is a later
    row, and a row that counts no more says since when."""

    __tablename__ = "rewards"

    row: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(unique=True)
    project: Mapped[str]
    trajectory_id: Mapped[str]
    completion_id: Mapped[str | None]
    choice: Mapped[int | None]
    name: Mapped[str]
    reward: Mapped[float]
    comment: Mapped[str | None]
    details: Mapped[dict[str, Any] | None]
    source: Mapped[str]
    idempotency_key: Mapped[str | None]
    body_digest: Mapped[bytes | None]
    created_at: Mapped[float]
    withdrawn_at: Mapped[float | None]

    __table_args__ = (
        ForeignKeyConstraint(
            ["project", "trajectory_id"],
            ["trajectories.project", "trajectories.id"],
            ondelete="CASCADE",
        ),
        UniqueConstraint("project", "idempotency_key", name="uq_rewards_idempotency"),
        Index("ix_rewards_trajectory", "project", "trajectory_id"),
        Index("ix_rewards_completion", "completion_id"),
    )


class Step(Base):
    """One optimiser step of one policy."""

    __tablename__ = "steps"

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    project: Mapped[str]
    policy: Mapped[str]
    parent_version: Mapped[int]
    version: Mapped[int | None]
    state: Mapped[str]
    """`running`, `done`, `failed` or `superseded` (a rollback came first)."""
    worker: Mapped[str]
    config: Mapped[dict[str, Any]]
    metrics: Mapped[dict[str, Any] | None]
    error: Mapped[str | None]
    reason: Mapped[str | None]
    """Kind of the error, such as `not_finite` or `disk_full`."""
    started_at: Mapped[float]
    finished_at: Mapped[float | None]

    __table_args__ = (Index("ix_steps_policy", "project", "policy", "id"),)


class CompletionUse(Base):
    """What the trainer made of one choice of a completion: the step it went into, or, with no
    step where all that was claimed had nothing to teach, the reason it was left out."""

    __tablename__ = "completion_uses"

    row: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    step_id: Mapped[int | None] = mapped_column(RowId)
    completion_id: Mapped[str]
    choice: Mapped[int]
    trajectory_id: Mapped[str]
    group_id: Mapped[str]
    reward: Mapped[float | None]
    advantage: Mapped[float | None]
    tokens: Mapped[int]
    """Sampled tokens that the loss was taken over; 0 where a reason is given."""
    reason: Mapped[str | None]
    revision: Mapped[int] = mapped_column(server_default="0")
    baseline: Mapped[float | None]
    """What the reward was compared with."""
    ratio: Mapped[float | None]
    """Mean importance weight of its tokens, against the version that sampled them."""

    __table_args__ = (
        Index("ix_uses_step", "step_id"),
        Index("ix_uses_completion", "completion_id"),
        Index("ix_uses_trajectory", "trajectory_id"),
    )


class Event(Base):
    """Something that happened to a policy: published, failed, rolled back."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    project: Mapped[str]
    policy: Mapped[str]
    kind: Mapped[str]
    version: Mapped[int | None]
    detail: Mapped[dict[str, Any]]
    at: Mapped[float]

    __table_args__ = (Index("ix_events_policy", "project", "policy", "id"),)


class Webhook(Base):
    """How far the events have been delivered to one of the webhooks of the settings."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(primary_key=True)
    """Its name in the settings."""
    cursor: Mapped[int] = mapped_column(BigInteger())
    """The newest event that was delivered, or is not to be."""
    attempts: Mapped[int] = mapped_column(default=0)
    """Of the event after it, all of them refused."""
    retry_at: Mapped[float | None]
    error: Mapped[str | None]
    lease_owner: Mapped[str | None]
    """The gateway that delivers, so that several do not send everything several times."""
    lease_expires: Mapped[float | None]
