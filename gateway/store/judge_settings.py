"""What may be set for a policy's judge: `[policies.NAME.judge]`."""

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_RUBRIC = (
    "Prefer the attempt that does what was asked, correctly and completely. Among those that do, "
    "prefer the one that needs fewer steps and words. An attempt that claims to have done what it "
    "has not done is worse than one that says that it failed."
)


class Judge(BaseModel):
    """A model that ranks the members of a group where nobody posts rewards."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    """A name under `[providers]`, or a policy of strop's own (`agent`, `agent@3`)."""

    rubric: str = Field(default=DEFAULT_RUBRIC, min_length=1)
    """What makes one attempt better than another."""

    reward: str = Field(default="judge", min_length=1)
    """Name of the rewards that it posts."""

    presentations: int = Field(default=3, ge=1, le=16)
    """How often the members are shown, each time in another order; ranks are averaged."""

    attempts: int = Field(default=3, ge=1, le=10)
    """How often one presentation is asked about until an answer can be used."""

    settle_seconds: float = Field(default=10.0, ge=0)
    """How long nothing must have been added to a group before it is judged."""

    budget: float | None = Field(default=None, ge=0)
    """US dollars in 24 hours; None: no limit. Models without a listed price, and strop's own
    policies, cost nothing here: `calls` limits them."""

    calls: int | None = Field(default=None, ge=0)
    """Questions in 24 hours; None: no limit."""

    over_people: bool = False
    """Judge also what has been given a reward by anybody else."""

    max_members: int = Field(default=16, ge=2, le=64)
    """Different answers of a group that are compared with each other, the earliest first."""

    max_chars: int = Field(default=24_000, ge=500)
    """Characters that are shown of one member, and of what all of them share."""

    max_tokens: int = Field(default=4096, ge=16)
    """Tokens that the judge may answer with."""

    temperature: float = Field(default=0.0, ge=0, le=2)
