"""What may be set about the life of a policy's versions: tables of `[policies.NAME]`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Keep(BaseModel):
    """`[policies.NAME.keep]`: versions whose files stay on the disk.

    What is served, on trial, trained from, or still loaded stays as well, and so does version 0.
    """

    model_config = ConfigDict(extra="forbid")

    newest: int = Field(default=20, ge=1)
    """The newest ones."""

    best: int = Field(default=3, ge=0)
    """Those with the best mean reward: of held-out trajectories, or of all where none is."""

    every: int = Field(default=10, ge=0)
    """Those whose number is a multiple of this; 0 keeps none for that."""

    after_seconds: float = Field(default=600.0, ge=0)
    """How long after it was taken out of service a version's files are left alone."""


class Guard(BaseModel):
    """`[policies.NAME.guard]`: when the version that is served is taken back by itself."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True

    level: float = Field(default=0.01, gt=0, lt=0.5)
    """For each version, the largest chance that it is taken back though it is no worse."""

    first_look: int = Field(default=8, ge=4)
    """Rewarded trajectories (or tasks, see `gateway.comparison`) of a version at which it is first
    compared with earlier ones; again at twice as many, and so on."""

    split: Literal["auto", "eval", "train"] = "auto"
    """Which rewards count. `auto`: held-out ones where there are enough, else those of training."""

    rate_factor: float = Field(default=0.5, gt=0, le=1)
    """What the learning rate is multiplied with when training starts again from a good version."""


class Canary(BaseModel):
    """`[policies.NAME.canary]`: new versions are on trial before they serve everybody.

    No step is taken while a version is on trial, so that nothing grows from an unproven one.
    """

    model_config = ConfigDict(extra="forbid")

    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the new trajectories that a version on trial gets; 0: there are no trials."""

    trajectories: int = Field(default=64, ge=4)
    """Rewarded trajectories (or tasks) after which a version that was not found worse, nor better
    before, is promoted."""

    deadline_seconds: float | None = Field(default=None, gt=0)
    """How long a trial may last; undecided by then, the version is dropped. None: for ever."""
