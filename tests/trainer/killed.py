"""What a trainer that is to be killed runs; imported once, by the server that forks it."""

import os
import signal
from pathlib import Path

import torch

from gateway.store import Database
from trainer import worker
from trainer.settings import TrainerSettings
from trainer.worker import Worker


def nothing() -> None:
    """Makes the server import all of the above."""


def train(url: str, artifacts: str, until: int, lease_seconds: float) -> None:
    """Train every policy until it has come so far."""
    torch.set_num_threads(1)
    settings = TrainerSettings(device="cpu", poll_seconds=0.03, resident_policies=2)
    # Shorter than a user may set it: the next one should not have to wait.
    settings = settings.model_copy(update={"lease_seconds": lease_seconds})
    Worker(Database(url), Path(artifacts), settings, until_version=until).run()


def train_until_written(url: str, artifacts: str, lease_seconds: float) -> None:
    """Be killed between the moment when a version is on the disk and that when it is recorded."""

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    worker.training.finish_step = killed  # type: ignore[assignment]
    train(url, artifacts, 1, lease_seconds)
