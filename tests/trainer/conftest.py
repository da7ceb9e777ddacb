"""Fixtures of the trainer's tests."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import tiny
from trainer.settings import TrainerSettings


@pytest.fixture(scope="session", autouse=True)
def quick() -> Iterator[None]:
    """Spares small models what large ones need."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # The training loop collects garbage at every step, and would look through all imports.
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny base model."""
    folder = tmp_path_factory.mktemp("base")
    tiny.model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base_model(base: Path) -> Any:
    """The model in it, for computing what a server would have logged."""
    return tiny.model()


@pytest.fixture
def make_log(tmp_path: Path, base: Path) -> Callable[..., tiny.Log]:
    """Makes a database with one policy; keyword arguments are its settings."""

    def make(**settings: Any) -> tiny.Log:
        return tiny.Log(tmp_path, base, **settings)

    return make


@pytest.fixture
def trainer_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TrainerSettings:
    """Settings of a trainer on the CPU, whatever file lies about."""
    monkeypatch.setenv("STROP_CONFIG", str(tmp_path / "none.toml"))
    return TrainerSettings(device="cpu", poll_seconds=0.01, backoff_seconds=0.01)
