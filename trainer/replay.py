"""Taking a step again: from what the log holds, and the version that it began from.

On the CPU, with the same packages, the adapter is the same bit for bit. A step that several
processes took is taken again by one, which adds up in another order: equal within `TOLERANCE`.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gateway.store import Database, queries, steps
from gateway.store.claims import TrainablePolicy
from gateway.store.records import Json
from trainer import checkpoints
from trainer.checkpoints import ADAPTER, StepRecord
from trainer.learner import Learner
from trainer.recipe import samples_from
from trainer.settings import TrainerSettings

_SETTINGS = ("device", "dtype", "quantization", "token_budget")
"""Settings of the trainer that change the numbers of a step."""
_KEPT_APART = ("lora", "settings", "held_by")
_PACKAGES = ("torch", "transformers", "peft", "trl")

TOLERANCE = 1e-5
"""Largest difference of a weight between one process and several."""


class ReplayError(Exception):
    """A step cannot be taken again; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """What came of taking a step again."""

    step_id: int
    version: int
    folder: Path
    """Where the adapter is now."""
    equal: bool | None
    """Whether it is the version's, bit for bit; None where that one's files are deleted."""
    largest_difference: float
    metrics: dict[str, float]
    other_packages: list[str]
    """Packages that are not those of then."""
    processes: int
    """Those that took the step then."""

    @property
    def agrees(self) -> bool | None:
        """Whether it is as near to the version as it must be; None if that cannot be told."""
        if self.processes == 1 or self.equal is None:
            return self.equal
        return self.largest_difference <= TOLERANCE


def config_of(policy: TrainablePolicy, settings: TrainerSettings) -> Json:
    """What is recorded with a step, so that it can be taken again."""
    return {
        "lora": policy.lora,
        "settings": policy.settings,
        "policy": {
            name: value
            for name, value in dataclasses.asdict(policy).items()
            if name not in _KEPT_APART
        },
        "trainer": {name: getattr(settings, name) for name in _SETTINGS},
        "threads": torch.get_num_threads(),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def replay(
    database: Database,
    settings: TrainerSettings,
    step_id: int,
    out: Path,
    *,
    project: str = "default",
) -> Replayed:
    """Take a step again and compare.

    Args:
        settings: those of the step are laid over them.
        step_id: a step that was finished.
        out: folder in which the version is written; nothing in the database changes.

    Raises:
        ReplayError: there is no such step, or it is from before steps could be taken again.
        LogChanged: the log does not hold any more what it was taken on.
        ModelError: base model or parent version cannot be loaded.
    """
    with database.read() as connection:
        row = steps.step(connection, project, step_id)
        made = (
            queries.version(connection, project, row["policy"], row["version"])
            if row is not None and row["version"] is not None
            else None
        )
    if row is None:
        raise ReplayError(f"there is no step {step_id} in project {project}")
    config = row["config"]
    if made is None:
        raise ReplayError(f"step {step_id} is {row['state']}; only a finished step made a version")
    if "samples" not in config:
        raise ReplayError(f"step {step_id} was taken before steps were recorded sample by sample")
    policy = TrainablePolicy(**config["policy"], lora=config["lora"], settings=config["settings"])
    parent = policy.head_path
    if parent is not None and row["parent_version"] > 0 and not Path(parent).is_dir():
        raise ReplayError(
            f"the files of {row['policy']}@{row['parent_version']}, from which step {step_id} "
            "began, are deleted"
        )
    samples = samples_from(database, project, config["samples"])
    torch.set_num_threads(config["threads"])
    # The budget that was found for it: passes cut otherwise add up in another order.
    budget = int((row["metrics"] or {}).get("token_budget", config["trainer"]["token_budget"]))
    chosen = {**config["trainer"], "token_budget": budget}
    learner = Learner(policy, settings.model_copy(update=chosen), out)
    stepped = learner.step(samples, lambda: False)
    folder = checkpoints.version_folder(out, project, policy.name, made["number"], step_id)
    checkpoints.discard(folder)
    record = StepRecord(made["number"], policy.head, step_id, learner.optimizer_steps, [], [], [])
    learner.save(folder, record)
    equal, difference = _compare(folder, made)
    return Replayed(
        step_id,
        made["number"],
        folder,
        equal,
        difference,
        stepped.metrics,
        _other_packages(config["packages"]),
        # Steps of before this was recorded were compared as if one process had taken them.
        config.get("processes", 1),
    )


def _compare(folder: Path, made: Json) -> tuple[bool | None, float]:
    original = Path(made["adapter_path"]) / ADAPTER
    if not original.is_file():
        return None, float("nan")
    ours, theirs = load_file(folder / ADAPTER), load_file(original)
    if ours.keys() != theirs.keys():
        return False, float("inf")
    equal = all(torch.equal(ours[name], theirs[name]) for name in ours)
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    return equal, largest


def _other_packages(then: dict[str, Any]) -> list[str]:
    now = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return [f"{n} {now[n]} (then {then[n]})" for n in _PACKAGES if then.get(n) != now[n]]


def command(arguments: Sequence[str]) -> int:
    """`python -m trainer replay STEP`: exit code 0 if the adapter is the same bit for bit."""
    import argparse
    import sys

    from gateway.store import StoreSettings
    from trainer.failures import sentence

    parser = argparse.ArgumentParser(
        prog="python -m trainer replay",
        description="Take a step again, from the log and the version that it began from.",
    )
    parser.add_argument("step", type=int, help="its id; `strop step list POLICY` shows them")
    parser.add_argument("--project", default="default")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the adapter is written (default: replays/)"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    chosen = parser.parse_args(list(arguments))
    store = StoreSettings()
    database = Database(store.url())
    database.migrate()
    out = chosen.out or store.data_dir.absolute() / "replays"
    try:
        found = replay(database, TrainerSettings(), chosen.step, out, project=chosen.project)
    except Exception as error:
        print(f"Error: {sentence(error)}", file=sys.stderr)
        return 1
    finally:
        database.dispose()
    print(json.dumps(_shown(found)) if chosen.json else "\n".join(_in_words(found)))
    return 1 if found.agrees is False else 0


def _shown(found: Replayed) -> Json:
    return {
        "object": "replay",
        **dataclasses.asdict(found),
        "folder": str(found.folder),
        "agrees": found.agrees,
    }


def _in_words(found: Replayed) -> list[str]:
    said = [f"Step {found.step_id} taken again: {found.folder}"]
    if found.other_packages:
        said.append("Packages are not those of then: " + ", ".join(found.other_packages))
    if found.processes > 1:
        said.append(
            f"{found.processes} processes took it then and one does now, which adds up in another "
            f"order: weights may differ by {TOLERANCE:g}."
        )
    if found.equal is None:
        said.append(
            f"The files of version {found.version} are deleted, so there is nothing to compare."
        )
    elif found.equal:
        said.append(f"It is version {found.version}, bit for bit.")
    else:
        by = f"by up to {found.largest_difference:.3g}"
        within = ", as it may" if found.agrees else ""
        said.append(f"It differs from version {found.version} {by}{within}.")
    return said
