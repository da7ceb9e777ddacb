"""Where the trajectory database and the artifacts are; shared by gateway and trainer."""

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)


def config_file() -> Path:
    """The settings file: `$STROP_CONFIG`, or `strop.toml` in the working directory."""
    return Path(os.environ.get("STROP_CONFIG", "strop.toml"))


class TomlSettings(BaseSettings):
    """Settings from the environment first, then from `strop.toml`."""

    model_config = SettingsConfigDict(
        env_prefix="STROP_", env_nested_delimiter="__", extra="ignore", validate_default=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order of precedence: arguments, environment, file."""
        toml = TomlConfigSettingsSource(settings_cls, toml_file=config_file())
        return init_settings, env_settings, toml


class StoreSettings(TomlSettings):
    """What both processes must agree on."""

    data_dir: Path = Path(".strop")
    """Everything that strop writes when it is not told otherwise."""

    database_url: str = ""
    """SQLAlchemy URL; empty means SQLite in `data_dir`. `postgresql://user:password@host/name`."""

    artifacts_dir: Path | None = None
    """Adapters and checkpoints; trainer, gateway and vLLM must see it under the same path."""

    commit_batch: int = Field(default=512, ge=1)
    """Most writes that share one commit."""

    commit_queue: int = Field(default=10_000, ge=1)
    """Writes that may wait for a commit before further ones are refused."""

    journal_pending_days: float = Field(default=7.0, gt=0)
    """Days for which a reward that was accepted while PostgreSQL was away waits for its completion
    to come, from another gateway's journal, before it is rejected with an error in the log."""

    def url(self) -> str:
        """The database URL with the default filled in."""
        return self.database_url or f"sqlite:///{self.data_dir / 'strop.db'}"

    def artifacts(self) -> Path:
        """The absolute artifacts folder."""
        return (self.artifacts_dir or self.data_dir / "artifacts").absolute()
