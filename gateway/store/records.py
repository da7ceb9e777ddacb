"""What the gateway hands to the store, and what reading the store gives back."""

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Tail:
    """The end of a thread: all that is needed to recognise and to store the turn after it."""

    completion_id: str
    choice: int
    trajectory_id: str
    messages_count: int
    messages_digest: bytes
    request_digest: bytes
    prompt_length: int
    """Tokens of the prompt, 0 where they are not known."""
    prompt_digest: bytes | None
    sequence_length: int
    """Tokens of prompt and answer together, 0 where they are not known."""
    sequence_digest: bytes | None


@dataclass(slots=True)
class TrajectoryRef:
    """The trajectory and group that a completion belongs to."""

    id: str
    group_id: str
    attribution: str
    split: str = "train"
    parent_id: str | None = None
    task: str | None = None
    traceparent: str | None = None
    """W3C trace context of this request."""


@dataclass(slots=True)
class CapturedChoice:
    """One answer with the tokens that were sampled; both lists None where not known."""

    index: int
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    thread_key: bytes | None = None


@dataclass(slots=True)
class CapturedCompletion:
    """One request and its response, ready to be stored."""

    id: str
    project: str
    trajectory: TrajectoryRef
    policy: str
    version: int | None
    trained: bool
    """Whether `policy` is a policy of the store; others have no group to wait in."""
    messages: list[Any]
    request: Json
    """The request as the client sent it, without its messages."""
    stream: bool
    created_at: float
    tail: Tail | None = None
    sampling: Json = field(default_factory=dict)
    client_metadata: Json | None = None
    status: str = "complete"
    http_status: int = 200
    reason: str | None = None
    served_model: str | None = None
    replica: str | None = None
    response: Json | None = None
    prompt_ids: list[int] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    choices: list[CapturedChoice] = field(default_factory=list)
    first_token_at: float | None = None
    finished_at: float = 0.0


@dataclass(slots=True)
class StoredChoice:
    """One answer as it is in the store."""

    index: int
    finish_reason: str | None
    token_ids: list[int] | None
    logprobs: list[float] | None


@dataclass(slots=True)
class StoredReward:
    """One reward, as posted."""

    id: str
    trajectory_id: str
    completion_id: str | None
    choice: int | None
    name: str
    reward: float
    comment: str | None
    metadata: Json | None
    source: str
    created_at: float


@dataclass(slots=True)
class StoredCompletion:
    """One completion, whole: what its turn shares with the one before is filled in."""

    id: str
    trajectory_id: str
    parent_id: str | None
    parent_choice: int | None
    policy: str
    version: int | None
    served_model: str | None
    replica: str | None
    status: str
    http_status: int
    reason: str | None
    stream: bool
    request: Json
    messages: list[Any]
    response: Json | None
    prompt_ids: list[int] | None
    prompt_tokens: int | None
    completion_tokens: int | None
    sampling: Json
    client_metadata: Json | None
    created_at: float
    first_token_at: float | None
    finished_at: float
    choices: list[StoredChoice]
    traceparent: str | None = None


@dataclass(slots=True)
class StoredTrajectory:
    """One episode with its completions in the order in which they were asked for."""

    project: str
    id: str
    policy: str
    group_id: str
    parent_id: str | None
    split: str
    attribution: str
    state: str
    reason: str | None
    step_id: int | None
    created_at: float
    updated_at: float
    completions: list[StoredCompletion]
    rewards: list[StoredReward]
    revision: int = 0
    """How often its rewards changed."""
    settled_revision: int | None = None
    """The revision that the trainer decided about last; None if it never did."""
