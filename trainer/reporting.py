"""The metrics of steps, to TensorBoard, Weights & Biases or trackio, by TRL's `report_to`.

The trackers are accelerate's, as they are TRL's. The database has all of it anyway, so a tracker
that fails is given up with a warning, and never costs a step.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gateway.store.claims import TrainablePolicy
from gateway.store.policy_settings import PolicySettings

log = logging.getLogger("strop.trainer")

_OPTIONS = {"wandb": {"reinit": "create_new"}}
"""Else W&B gives every policy of the process the run of the first, and drops what it sees as its
past."""


class Reporter:
    """Trackers of all policies of this process, opened when they are first needed."""

    def __init__(self, artifacts: Path):
        """TensorBoard's files go to `runs` beside the artifacts."""
        self._folder = artifacts.parent / "runs"
        self._open: dict[tuple[str, ...], Any] = {}

    def report(
        self,
        policy: TrainablePolicy,
        settings: PolicySettings,
        version: int,
        metrics: Mapping[str, Any],
    ) -> None:
        """Report a step; the version that it made is the tracker's step."""
        values = flat(metrics)
        for name in _chosen(settings):
            try:
                self._tracker(name, policy, settings).log(values, step=version)
            except Exception as error:
                log.warning("%s: its step was not reported to %s: %s", policy.name, name, error)

    def _tracker(self, name: str, policy: TrainablePolicy, settings: PolicySettings) -> Any:
        run = settings.training.get("run_name") or f"{policy.project}-{policy.name}"
        key = (name, policy.project, policy.name, run)
        if key not in self._open:
            self._open[key] = _start(name, run, self._folder)
        return self._open[key]

    def close(self) -> None:
        """End all runs."""
        for tracker in self._open.values():
            try:
                tracker.finish()
            except Exception as error:
                log.warning("a run was not ended well: %s", error)
        self._open.clear()


def _chosen(settings: PolicySettings) -> list[str]:
    given = settings.training.get("report_to") or []
    names = [given] if isinstance(given, str) else given
    return [name for name in names if name != "none"]


def _start(name: str, run: str, folder: Path) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    try:
        if kind.requires_logging_directory:
            folder.mkdir(parents=True, exist_ok=True)
            tracker = kind(quote(run, safe="@"), str(folder))
        else:
            tracker = kind(run, **_OPTIONS.get(name, {}))
        tracker.start()
    except ImportError as error:
        package = "tensorboardX" if name == "tensorboard" else name
        raise RuntimeError(
            f"{error}; pip install {package}, or take it out of report_to"
        ) from error
    return tracker


def flat(metrics: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Numbers by name; those of inner tables as `table/name`."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{before}{name}/"))
        elif isinstance(value, int | float):
            found[before + name] = value
    return found
