"""LoRA adapter folders as PEFT writes them, for any Llama-like base, without torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 256,
    "vocab_size": 32,
}
"""A configuration small enough for adapters that only the fake has to load."""


def write_adapter(
    folder: Path,
    base_model: Path | dict[str, Any],
    rank: int = 8,
    seed: int = 0,
    zero: bool = False,
    *,
    scale: float = 0.02,
    target_modules: Sequence[str] = LINEAR_LAYERS,
) -> Path:
    """Write an adapter with random A, and B random too or, with `zero`, of zeros.

    Args:
        base_model: folder with a config.json, or such a configuration itself.
        scale: standard deviation of B; at 0.02 the model's answers visibly differ.
    """
    if isinstance(base_model, Path):
        config = json.loads((base_model / "config.json").read_text())
    else:
        config = base_model
    shapes = module_shapes(config)
    dice = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for layer in range(config["num_hidden_layers"]):
        for module in target_modules:
            name, out, width = shapes[module]
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = dice.normal(0, width**-0.5, (rank, width))
            b = np.zeros((out, rank)) if zero else dice.normal(0, scale, (out, rank))
            tensors[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(target_modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def module_shapes(config: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Layer → its name inside a block, rows, columns."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, config.get("num_key_value_heads", heads) * width
    return {
        "q_proj": ("self_attn.q_proj", queries, hidden),
        "k_proj": ("self_attn.k_proj", keys, hidden),
        "v_proj": ("self_attn.v_proj", keys, hidden),
        "o_proj": ("self_attn.o_proj", hidden, queries),
        "gate_proj": ("mlp.gate_proj", inner, hidden),
        "up_proj": ("mlp.up_proj", inner, hidden),
        "down_proj": ("mlp.down_proj", hidden, inner),
    }
