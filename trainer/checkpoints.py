"""A version on disk: the adapter that vLLM loads, and what training needs to go on from it.

    artifacts/{project}/{policy}/{version:06d}-{step}/
        adapter_config.json, adapter_model.safetensors     as PEFT and vLLM read them, float32
        state/training.pt                                  optimiser, schedule, random numbers
        state/step.json                                    what the step consumed

A folder appears under its name only when all of it is on the disk, and is never written to again.
A trainer that is killed leaves at most a hidden `.partial-` folder, which the next one removes.
"""

import contextlib
import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.model import ModelError

ADAPTER = "adapter_model.safetensors"
_TRAINING = Path("state") / "training.pt"
_STEP = Path("state") / "step.json"
_ABANDONED_SECONDS = 86_400.0
_VERSION_FOLDER = re.compile(r"\d{6,}-(\d+)")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What made a version, as kept beside it."""

    version: int
    parent: int
    step_id: int
    optimizer_steps: int
    groups: list[str]
    trajectories: list[str]
    completions: list[str]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a step changes besides the weights."""

    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    random: Tensor
    """State of torch's generator on the CPU."""
    optimizer_steps: int


def version_folder(artifacts: Path, project: str, policy: str, version: int, step_id: int) -> Path:
    """Where a version belongs. The step's id makes the path new even after a rollback."""
    return policy_folder(artifacts, project, policy) / f"{version:06d}-{step_id}"


def step_of(folder: Path) -> int | None:
    """The step that a version's folder is named after; None if it is no such folder."""
    match = _VERSION_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match is not None else None


def policy_folder(artifacts: Path, project: str, policy: str) -> Path:
    """Where the versions of a policy are; names from clients cannot lead out of it."""
    return artifacts / _file_name(project) / _file_name(policy)


def _file_name(name: str) -> str:
    # Percent-encoding leaves dots alone, and a name of dots is a place.
    quoted = quote(name, safe="")
    return quoted.replace(".", "%2E") if quoted.startswith(".") else quoted


def save(folder: Path, model: Any, state: TrainingState, record: StepRecord) -> None:
    """Write a version, whole or not at all.

    Args:
        folder: must not exist yet.
        model: the PEFT model.
        state: saved beside the adapter.
        record: saved beside the adapter.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    partial = folder.parent / f".partial-{folder.name}-{os.getpid()}"
    try:
        (partial / "state").mkdir(parents=True)
        weights = get_peft_model_state_dict(model, save_embedding_layers=False)
        save_file(
            {name: w.detach().float().cpu().contiguous() for name, w in weights.items()},
            partial / ADAPTER,
            metadata={"format": "pt"},
        )
        config = model.peft_config["default"]
        trainable, config.inference_mode = config.inference_mode, True
        config.save_pretrained(str(partial))
        config.inference_mode = trainable
        torch.save(
            {
                "optimizer": state.optimizer,
                "scheduler": state.scheduler,
                "random": state.random,
                "optimizer_steps": state.optimizer_steps,
            },
            partial / _TRAINING,
        )
        (partial / _STEP).write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
        _open_to_readers(partial)
        _sync(partial)
        os.rename(partial, folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_adapter(folder: Path, model: Any) -> None:
    """Put a version's adapter into the PEFT model.

    Raises:
        ModelError: it is missing, broken, of another shape, or not finite.
    """
    set_peft_model_state_dict(model, reference(folder, model))


def reference(folder: Path, model: Any) -> dict[str, Tensor]:
    """A version's adapter, by the names of its weights, as it fits into the PEFT model.

    Raises:
        ModelError: it is missing, broken, of another shape, or not finite.
    """
    try:
        weights: dict[str, Tensor] = load_file(folder / ADAPTER)
    except Exception as error:
        raise ModelError(
            f"the adapter in {folder} cannot be read ({error}); restore the folder, or roll the "
            "policy back to a version whose folder is whole."
        ) from error
    expected = {
        name: tuple(w.shape)
        for name, w in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    found = {name: tuple(w.shape) for name, w in weights.items()}
    if expected != found:
        raise ModelError(
            f"the adapter in {folder} does not fit the policy's lora settings and base model; "
            "rank, alpha, target modules and base model must stay the same for all versions."
        )
    if not all(bool(torch.isfinite(w).all()) for w in weights.values()):
        raise ModelError(f"the adapter in {folder} holds numbers that are not finite; roll back.")
    return weights


def is_untrained(folder: Path) -> bool:
    """Whether a folder holds no training state and an adapter that changes nothing: all B zero.

    Training goes on from a fresh initialisation then, because with both factors zero no gradient
    reaches either.
    """
    if (folder / _TRAINING).exists() or not (folder / ADAPTER).is_file():
        return False
    factors = [w for name, w in load_file(folder / ADAPTER).items() if ".lora_B." in name]
    return not any(bool(w.any()) for w in factors)


def load_state(folder: Path) -> TrainingState | None:
    """The training state of a version; None where only an adapter is there.

    Raises:
        ModelError: the state is there and cannot be read.
    """
    path = folder / _TRAINING
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(
            f"the training state in {path} cannot be read ({error}); restore it, or remove the "
            f"folder {path.parent} to go on from the adapter with a new optimiser."
        ) from error
    return TrainingState(
        state["optimizer"], state["scheduler"], state["random"], state["optimizer_steps"]
    )


def load_record(folder: Path) -> StepRecord:
    """What made a version."""
    return StepRecord(**json.loads((folder / _STEP).read_text(encoding="utf-8")))


def discard(folder: Path) -> None:
    """Remove a version that never became one."""
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for partial in parent.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if partial.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    # vLLM may run as another user, and safetensors writes files for their owner only.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
