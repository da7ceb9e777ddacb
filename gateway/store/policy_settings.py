"""What may be set for a policy, in `strop.toml` under `[policies.NAME]` or by the API."""

import re
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.store.judge_settings import Judge
from gateway.store.life_settings import Canary, Guard, Keep
from gateway.store.training_settings import CORRECTION, Training, check

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(BaseModel):
    """Shape of a policy's adapters; the same for all of its versions."""

    model_config = ConfigDict(extra="forbid")

    rank: Literal[1, 8, 16, 32, 64, 128, 256] = 8
    """One of the ranks that vLLM can be started with."""

    alpha: float = Field(default=16, gt=0)
    """Scale: the adapter's product is multiplied by alpha / rank."""

    target_modules: list[str] = Field(default_factory=lambda: list(LINEAR_LAYERS), min_length=1)
    """Last parts of the names of the linear layers that are adapted."""


class Sampling(BaseModel):
    """What a request gets that says nothing itself; the defaults are the model's own distribution.

    A client may ask for something else; that is recorded, and what it does to training is said by
    the completion's reason.
    """

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)


class PolicySettings(BaseModel):
    """How a policy's trajectories are grouped, rewarded and trained on."""

    model_config = ConfigDict(extra="forbid")

    group_size: int = Field(default=4, ge=2)
    """Rewarded trajectories that make a group ready for training."""

    groups_per_step: int = Field(default=4, ge=1)
    """Ready groups that one optimiser step waits for."""

    settle_seconds: float = Field(default=2.0, ge=0)
    """How long nothing must have been added to a group before it is taken."""

    deadline_seconds: float = Field(default=3600.0, gt=0)
    """Age of its oldest trajectory at which a group is taken however few rewards it has."""

    max_staleness: int = Field(default=8, ge=0)
    """Versions that may lie between the one that sampled and the one being trained."""

    min_effective_sample: float = Field(default=0.1, ge=0, le=1)
    """Smallest share of a trajectory's tokens that must be left after weighing them by what the
    version being trained makes of them (effective sample size / tokens); looked at where more than
    one version lies between. Below it the trajectory is `stale`."""

    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """What a completion's reward loses with each turn that lies between it and an earlier one; at
    0 it is its own turn's alone. Rewards of a trajectory are all turns', undiscounted."""

    old_policy: Literal["logged", "recomputed"] = "logged"
    """What the ratio of the loss is taken against: the logged probabilities, or those of the
    step's start, with truncated or masked importance weights between the two."""

    kl_version: int | None = Field(default=None, ge=0)
    """Version that the KL term (`training.beta`) keeps near; without it the base model."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What a member of a group is compared with: the mean of all, or of all others."""

    singles: bool = False
    """Train on tasks that were seen once too, against a running baseline of the policy's rewards
    and, where there is one, of the task's."""

    max_tokens: int = Field(default=32768, ge=1)
    """Longest sample, in tokens, that is trained on."""

    train_biased: bool = False
    """Train on completions sampled with top-p, top-k, min-p or penalties too."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each named reward in the sum; 1 for those not named here."""

    sampling: Sampling = Field(default_factory=Sampling)
    """Sampling of requests that do not say it themselves."""

    side_calls: list[str] = Field(default_factory=list)
    """Regular expressions: requests whose system prompt matches one, such as a request for a
    title, are logged and never trained on."""

    keep: Keep = Field(default_factory=Keep)
    """Versions whose files stay on the disk."""

    guard: Guard = Field(default_factory=Guard)
    """When a version is taken back by itself."""

    canary: Canary = Field(default_factory=Canary)
    """Whether a new version is on trial first."""

    pause_after: int = Field(default=3, ge=1)
    """Steps in a row with numbers that are not finite after which the policy is paused."""

    judge: Judge | None = None
    """A model that ranks the members of groups that nobody rewards."""

    training: dict[str, Any] = Field(default_factory=dict)
    """Fields of TRL's `GRPOConfig`, by their names."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name in cls.model_fields:
                continue
            if name in Training.model_fields:
                raise ValueError(f"{name} belongs into the table training: training.{name}")
            near = get_close_matches(name, cls.model_fields, n=1, cutoff=0.0)[0]
            raise ValueError(f"{name} is not a setting of a policy; did you mean {near}?")
        return given

    @model_validator(mode="after")
    def _trains(self) -> "PolicySettings":
        check(self.training)
        ignored = [name for name in self.training if name.startswith(CORRECTION)]
        if ignored and self.old_policy == "logged":
            raise ValueError(
                f'training.{ignored[0]} does something with old_policy = "recomputed" only: '
                "against logged probabilities there is one ratio, and it is clipped"
            )
        if self.kl_version is not None and not self.training.get("beta"):
            raise ValueError("kl_version does nothing without training.beta above 0")
        return self

    @field_validator("side_calls")
    @classmethod
    def _compiles(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return patterns
