"""LoRA adapter folders: making the zero adapter of version 0, and refusing broken ones.

vLLM answers 200 to adapters with NaN weights, wrong shapes or layers missing, and one NaN then
poisons the key-value blocks of other requests. So nothing is loaded that was not looked at first.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gateway.store.policy_settings import Lora

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."


class BrokenAdapter(Exception):
    """An adapter folder that must not be loaded; the message says why."""


def linear_shapes(base_model: Path, target_modules: list[str]) -> dict[str, tuple[int, int]]:
    """Module name → (out, in) of the base model's layers that an adapter covers.

    Read from the headers of its safetensors files, without the weights.

    Raises:
        BrokenAdapter: the folder has no safetensors files, or no such layers.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(base_model.glob("*.safetensors")):
        for name, entry in _header(file).items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module.rpartition(".")[2] in target_modules:
                out, width = entry["shape"]
                shapes[module] = (out, width)
    if not shapes:
        raise BrokenAdapter(
            f"{base_model} has no layers named {', '.join(target_modules)} in its safetensors "
            "files; check the policy's lora.target_modules"
        )
    return shapes


def write_zero(folder: Path, base_model: Path, lora: Lora) -> None:
    """Write the adapter that changes nothing: every B is zero.

    Version 0 is served through it because on CPU vLLM computes the bare base wrongly when it is
    batched with adapters (vllm-project/vllm#48421).
    """
    if (folder / CONFIG).exists():
        return
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for module, (out, width) in linear_shapes(base_model, lora.target_modules).items():
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.zeros((lora.rank, width), np.float32)
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = np.zeros((out, lora.rank), np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.target_modules,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    # Written last: a folder with a configuration is complete.
    partial = folder / (CONFIG + ".partial")
    partial.write_text(json.dumps(config, indent=1))
    partial.replace(folder / CONFIG)


def check(folder: Path, lora: Lora, base_model: Path) -> None:
    """Look an adapter over before a replica may load it.

    Args:
        base_model: the base's folder, to check shapes and completeness against; where it is a
            hub name, only rank and finiteness are checked.

    Raises:
        BrokenAdapter: it must not be loaded.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise BrokenAdapter(f"{folder / CONFIG} cannot be read: {error}") from None
    if config.get("r") != lora.rank:
        raise BrokenAdapter(f"rank is {config.get('r')}, the policy's is {lora.rank}")
    if config.get("use_dora"):
        raise BrokenAdapter("DoRA adapters cannot be served by vLLM")
    expected = _expected(base_model, lora) if base_model.is_dir() else None
    seen = set()
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (it has no other way to be iterated)
                seen.add(name)
                _check_tensor(name, file.get_tensor(name), lora.rank, expected)
    except (OSError, SafetensorError) as error:
        raise BrokenAdapter(f"{folder / WEIGHTS} cannot be read: {error}") from None
    missing = set(expected or ()) - seen
    if missing:
        raise BrokenAdapter(f"{len(missing)} tensors are missing, {sorted(missing)[0]} among them")
    if not seen:
        raise BrokenAdapter("it holds no tensors")


def _expected(base_model: Path, lora: Lora) -> dict[str, tuple[int, int]]:
    expected: dict[str, tuple[int, int]] = {}
    for module, (out, width) in linear_shapes(base_model, lora.target_modules).items():
        expected[f"{_PREFIX}{module}.lora_A.weight"] = (lora.rank, width)
        expected[f"{_PREFIX}{module}.lora_B.weight"] = (out, lora.rank)
    return expected


def _check_tensor(
    name: str,
    tensor: np.ndarray[Any, Any],
    rank: int,
    expected: dict[str, tuple[int, int]] | None,
) -> None:
    if expected is not None:
        if name not in expected:
            raise BrokenAdapter(f"{name} fits no layer of the base model")
        if tensor.shape != expected[name]:
            raise BrokenAdapter(f"{name} has shape {tensor.shape}, not {expected[name]}")
    elif rank not in tensor.shape:
        raise BrokenAdapter(f"{name} has shape {tensor.shape}, which does not fit rank {rank}")
    if not np.isfinite(tensor).all():
        raise BrokenAdapter(f"{name} holds values that are not finite")


def _header(file: Path) -> dict[str, Any]:
    # The format: 8 bytes with the header's length, then the header as JSON.
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header
