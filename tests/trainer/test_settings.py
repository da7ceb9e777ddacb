"""Settings of the training process."""

import pytest
from pydantic import ValidationError

from trainer.settings import TrainerSettings


def test_the_environment_comes_before_the_trainer_table_of_the_file(monkeypatch, tmp_path):
    file = tmp_path / "strop.toml"
    file.write_text("poll_seconds = 99\n[trainer]\npoll_seconds = 7\nlease_seconds = 70\n")
    monkeypatch.setenv("STROP_CONFIG", str(file))
    monkeypatch.setenv("STROP_TRAINER_LEASE_SECONDS", "30")
    settings = TrainerSettings()
    assert (settings.poll_seconds, settings.lease_seconds) == (7, 30)


def test_without_a_file_there_are_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("STROP_CONFIG", str(tmp_path / "none.toml"))
    assert TrainerSettings().device == "auto"


def test_a_wrong_value_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("STROP_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("STROP_TRAINER_DEVICE", "tpu")
    with pytest.raises(ValidationError, match="device"):
        TrainerSettings()
