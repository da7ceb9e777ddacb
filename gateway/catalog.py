"""What the model names of clients mean right now; replaced as a whole by the publisher."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from gateway.capture.threads import normalise
from gateway.errors import ApiError, model_not_found

_VERSIONED = re.compile(r"(?P<policy>.+)@(?P<number>\d{1,9})")


def split_version(name: str) -> tuple[str, int | None]:
    """The policy and the number in a version's name, as clients write it or as replicas serve it.

    A name of another form is whole, and has no number.
    """
    match = _VERSIONED.fullmatch(name)
    return (match["policy"], int(match["number"])) if match is not None else (name, None)


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy and its versions that requests may be sent to."""

    name: str
    alias: int
    loaded: Mapping[int, str]
    """Version number → name under which the replicas serve it."""
    created: int
    base_model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling of requests that do not say it themselves."""
    side_calls: tuple[re.Pattern[str], ...] = ()
    """What a system prompt holds in requests that are not the agent's own work."""
    canary: int | None = None
    """The version on trial."""
    canary_share: float = 0.0
    """Share of the new trajectories that it gets."""

    def begins_with(self, trajectory_id: str) -> int:
        """The version that a new trajectory gets; every gateway draws the same."""
        if self.canary is None:
            return self.alias
        drawn = blake2b(f"{self.name}@{self.canary} {trajectory_id}".encode(), digest_size=8)
        share = int.from_bytes(drawn.digest()) / 2**64
        return self.canary if share < self.canary_share else self.alias

    def is_side_call(self, messages: Sequence[Any]) -> bool:
        """Whether the system prompt matches one of the policy's rules."""
        if not self.side_calls:
            return False
        first = normalise(messages[0])
        if first["role"] not in ("system", "developer"):
            return False
        text = str(first.get("content", ""))
        return any(pattern.search(text) for pattern in self.side_calls)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All policies by project and name."""

    policies: Mapping[tuple[str, str], ServedPolicy] = field(default_factory=dict)

    def of(self, project: str) -> list[ServedPolicy]:
        """The policies of a project, by name."""
        return [p for (owner, _), p in sorted(self.policies.items()) if owner == project]

    def names(self, project: str) -> list[str]:
        """Every model name that a client of the project may use."""
        return [
            name
            for policy in self.of(project)
            for name in (policy.name, *(f"{policy.name}@{n}" for n in sorted(policy.loaded)))
        ]

    def find(self, project: str, model: str) -> tuple[ServedPolicy, int | None]:
        """The policy of a model name, and the version if the name pins one.

        Raises:
            ApiError: 404, naming the models there are.
        """
        policy = self.policies.get((project, model))
        if policy is not None:
            return policy, None
        name, number = split_version(model)
        policy = self.policies.get((project, name))
        if policy is not None and number in policy.loaded:
            return policy, number
        raise model_not_found(model, self.names(project))


def served_version(
    policy: ServedPolicy, pinned: int | None, began: int | None, trajectory_id: str | None = None
) -> tuple[int, str]:
    """The version that answers, and its served name.

    Args:
        pinned: the version that the request itself names.
        began: the version that the trajectory began with; it stays while that is loaded.
        trajectory_id: by which a new trajectory gets the version on trial, or not.

    Raises:
        ApiError: 503, nothing is loaded yet.
    """
    fresh = None
    if began is None and trajectory_id is not None:
        fresh = policy.begins_with(trajectory_id)
    for number in (pinned, began, fresh, policy.alias):
        if number is not None and number in policy.loaded:
            return number, policy.loaded[number]
    raise ApiError(
        503,
        f"{policy.name}@{policy.alias} is not loaded on any vLLM replica yet. Try again in a few "
        "seconds; if it lasts, GET /readyz says what is missing.",
        code="model_not_ready",
        retry_after=2,
    )
