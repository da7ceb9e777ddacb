"""What may be set for a webhook, in `strop.toml` under `[webhooks.NAME]`."""

from pydantic import BaseModel, ConfigDict, Field

from gateway.store.models import DEFAULT_PROJECT

TOLD = ["published", "promoted", "rolled_back", "withdrawn", "dropped", "failed", "step_failed"]
"""Kinds of events that are delivered if nothing else is set: a version is served, is no longer,
or came to nothing."""


class Webhook(BaseModel):
    """An address to which events are posted, signed as standardwebhooks.com describes."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(pattern=r"^https?://.+")
    """Where to. An answer of 2xx means that it was taken; anything else is tried again."""

    secret_env: str = Field(min_length=1)
    """Name of the environment variable with the secret: `whsec_` and base64, or any text."""

    events: list[str] = Field(default_factory=lambda: list(TOLD), min_length=1)
    """Kinds of events that are delivered; `*` is all of them."""

    project: str = DEFAULT_PROJECT
    """The project whose events they are."""

    policy: str | None = None
    """Of this policy alone."""

    timeout: float = Field(default=10.0, gt=0)
    """Seconds that the address may take to answer."""

    retry_seconds: float = Field(default=1.0, gt=0)
    """Pause after the first refusal; it doubles with each further one, up to five minutes."""
