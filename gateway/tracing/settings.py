"""Where traces go, and what becomes of the scores that are put on them: `[langfuse]`."""

import logging
import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.store.models import DEFAULT_PROJECT

log = logging.getLogger("strop.langfuse")

_ENVIRONMENT = ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "LANGFUSE_BASE_URL")


class LangfuseProject(BaseModel):
    """The Langfuse project that a project of strop goes to: `[langfuse.projects.NAME]`."""

    model_config = ConfigDict(extra="forbid")

    public_key: str
    """`pk-lf-…`."""

    secret_key: str = Field(default="", repr=False)
    """`sk-lf-…`."""

    secret_key_env: str | None = None
    """Environment variable that holds the secret key instead."""

    base_url: str
    """Address of Langfuse, such as `https://cloud.langfuse.com`."""

    @model_validator(mode="after")
    def _resolved(self) -> "LangfuseProject":
        if not self.secret_key and self.secret_key_env:
            self.secret_key = os.environ.get(self.secret_key_env, "")
        if not self.secret_key:
            where = f"the environment variable {self.secret_key_env}" if self.secret_key_env else ""
            raise ValueError(f"no secret_key: set it, or {where or 'secret_key_env'}")
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {self.base_url!r} must begin with http:// or https://")
        self.base_url = self.base_url.rstrip("/")
        return self


class ScoreMap(BaseModel):
    """What a score of Langfuse's is worth as a reward: `[langfuse.scores."NAME"]`.

    reward = score · `scale` + `offset` for numbers; true and false are 1 and 0 before that.
    """

    model_config = ConfigDict(extra="forbid")

    reward: str = Field(default="reward", min_length=1)
    """Name of the reward."""

    scale: float = Field(default=1.0, allow_inf_nan=False)
    offset: float = Field(default=0.0, allow_inf_nan=False)

    categories: dict[str, float] = Field(default_factory=dict)
    """Value of each category of a categorical score; others are passed over."""

    sources: list[Literal["ANNOTATION", "EVAL", "API"]] = Field(
        default=["ANNOTATION", "EVAL", "API"], min_length=1
    )
    """Where the score must come from: people, Langfuse's evaluators, its API."""


class LangfuseSettings(BaseModel):
    """Langfuse, out and in. `LANGFUSE_PUBLIC_KEY`, `LANGFUSE_SECRET_KEY` and `LANGFUSE_BASE_URL`
    in the environment are those of the project `default`."""

    model_config = ConfigDict(extra="forbid")

    projects: dict[str, LangfuseProject] = Field(default_factory=dict)
    """By strop's project. Only the projects named here, or by the environment, are traced."""

    scores: dict[str, ScoreMap] = Field(default_factory=dict)
    """Scores that become rewards, by their name in Langfuse. None: scores are not read."""

    environment: str = Field(default="", pattern=r"^[a-z0-9_-]*$")
    """Langfuse's `environment` of what is sent."""

    public_url: str = ""
    """Address of strop's pages as people reach it, for links; empty: its host and port."""

    poll_seconds: float = Field(default=15.0, gt=0)
    """Between two looks for new scores."""

    compare_seconds: float = Field(default=300.0, gt=0)
    """Between two comparisons of all scores, which find what was edited or deleted."""

    compare_days: float = Field(default=30.0, gt=0)
    """How old a score may be to be compared."""

    send_seconds: float = Field(default=0.5, gt=0)
    """Between two looks for something to send, when there was nothing."""

    lag_seconds: float = Field(default=300.0, ge=0)
    """While no core is idle, sending gets a small share of one, and three times as much once
    something has waited for so long. 0: it gets what it needs, at the cost of requests."""

    timeout: float = Field(default=10.0, gt=0)
    """Seconds that Langfuse may take for an answer."""

    drain_seconds: float = Field(default=10.0, ge=0)
    """Seconds that the gateway's shutdown waits for what is still to be sent. What is left is sent
    after the next start."""

    @model_validator(mode="after")
    def _from_environment(self) -> "LangfuseSettings":
        values = [os.environ.get(name, "").strip() for name in _ENVIRONMENT]
        if DEFAULT_PROJECT in self.projects or not any(values):
            return self
        if not all(values):
            missing = [n for n, value in zip(_ENVIRONMENT, values, strict=True) if not value]
            log.warning("Langfuse is off: %s is not set", " and ".join(missing))
            return self
        public_key, secret_key, base_url = values
        self.projects[DEFAULT_PROJECT] = LangfuseProject(
            public_key=public_key, secret_key=secret_key, base_url=base_url
        )
        return self
