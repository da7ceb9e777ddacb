"""Settings of the training process, in `strop.toml` under `[trainer]`."""

import tomllib
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.store.settings import TomlSettings, config_file


class TrainerSettings(TomlSettings):
    """How the trainer works; what it trains is a policy's own settings.

    The environment comes before the file: `STROP_TRAINER_TOKEN_BUDGET=8192`.
    """

    model_config = SettingsConfigDict(env_prefix="STROP_TRAINER_")

    poll_seconds: float = Field(default=1.0, gt=0)
    """Pause between two looks at the database when there was nothing to do."""

    lease_seconds: float = Field(default=120.0, ge=5)
    """How long a policy and its groups stay with a trainer that has died before another may take
    them. A living one renews its leases three times as often."""

    backoff_seconds: float = Field(default=5.0, gt=0)
    """Pause of a policy after a failed step; doubled with each further failure in a row."""

    backoff_limit_seconds: float = Field(default=600.0, gt=0)
    """Longest such pause."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` is CUDA where torch finds it."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model; `auto` is bfloat16 on CUDA, else float32. Adapters are always float32.
    bfloat16 needs CUDA."""

    quantization: Literal["none", "nf4"] = "none"
    """`nf4` loads the base model in 4 bits (QLoRA, Dettmers et al. 2023), by bitsandbytes; needs
    CUDA. The probes that versions must pass then need a `probe_tolerance` that allows for it."""

    token_budget: int = Field(default=0, ge=0)
    """Different tokens that one forward and backward pass may hold, which is also the longest
    sample that is trained on; 0 finds it from free memory when a policy is loaded. Where it is too
    many, it is halved and the step taken again."""

    resident_policies: int = Field(default=1, ge=1)
    """Policies whose model and optimiser stay in memory between their steps."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is written to standard error."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence: arguments, environment, the `[trainer]` table of the file."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, _trainer_table())


def _trainer_table() -> dict[str, Any]:
    file = config_file()
    if not file.is_file():
        return {}
    table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("trainer", {})
    return table
