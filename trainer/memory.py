"""How many different tokens one forward and backward pass may hold, found from free memory.

An estimate from the model's shape, on the safe side; if it is too large all the same, the learner
halves it and takes the step again.
"""

import gc
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from trainer.logprobs import Way

SMALLEST, LARGEST = 256, 1 << 17
SHARE = {"cpu": 0.5, "cuda": 0.8}
"""Of the free memory; on a CPU other programs live from it too, such as vLLM."""

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def token_budget(model: nn.Module, way: Way, *, checkpointing: bool) -> int:
    """Tokens of one pass: different ones of a trie, or those of padded rows.

    Args:
        model: loaded, on its device.
        way: how it is forwarded.
        checkpointing: whether layers are computed again in the backward pass.
    """
    device = next(model.parameters()).device
    free = free_bytes(device) * SHARE[device.type]
    tokens = int(free / token_bytes(model, way, checkpointing=checkpointing))
    return max(SMALLEST, min(LARGEST, tokens // SMALLEST * SMALLEST))


def token_bytes(model: nn.Module, way: Way, *, checkpointing: bool) -> int:
    """What a pass keeps of a token until its backward pass, in bytes, roughly and rather more."""
    config = cast(Any, model).config.get_text_config()
    hidden = int(config.hidden_size)
    # Of the experts of a mixture, those that a token goes through.
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    inner *= int(getattr(config, "num_experts_per_tok", None) or 1)
    width = int(getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    # Residual stream and norms; queries, attention and keys and values, once more for their
    # derivatives; gate, its activation, up and their product.
    layer = 6 * hidden + 4 * heads * width + 4 * shared * width + 5 * inner
    layers = int(config.num_hidden_layers)
    numbers = layers * hidden + layer if checkpointing else layers * layer
    size = 2 if cast(Any, model).dtype in (torch.bfloat16, torch.float16) else 4
    logits = 12 * int(config.vocab_size) if way is Way.PADDED else 0
    return numbers * size + logits


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free for torch.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = next(
        int(line.split()[1]) * 1024
        for line in _MEMINFO.read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        # No container, or one without a limit.
        return available
    return min(available, max(0, limit - used))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on a GPU or on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def spare_collection(accelerator: Any) -> None:
    """Let an accelerator forget what it prepared without a garbage collection at every step.

    transformers asks for one whenever training starts, which is once a step here; it looks through
    all imports, for a second, and finds nothing.
    """

    def forget(*objects: Any) -> list[Any]:
        for prepared in ("_schedulers", "_optimizers", "_models", "_dataloaders"):
            setattr(accelerator, prepared, [])
        accelerator.step = 0
        return list(objects)

    accelerator.free_memory = forget


def release() -> None:
    """Give back what is not used any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
