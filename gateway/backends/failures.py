"""What a vLLM that did not start, or died, was telling in its log: one sentence."""

import re

_CAUSES: list[tuple[str, str]] = [
    (
        r"Address already in use",
        "its port is taken; stop what listens there, or set `vllm.port` to another (0: a free one)",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks"
        r"|Free memory on device.*less than desired",
        "out of GPU memory; lower `vllm.gpu_memory_utilization` or `vllm.max_model_len`, or stop "
        "what else uses the GPU",
    ),
    (
        r"MemoryError|std::bad_alloc|not enough memory|Cannot allocate memory|failed to allocate",
        "out of memory; lower `vllm.kv_cache_memory_bytes`, `vllm.max_model_len` or "
        "`vllm.max_num_seqs`, or take a smaller model",
    ),
    (
        r"PackageNotFoundError: No package metadata was found for (\S+)",
        "the package {0} is missing or installed under another name; install it, or start vLLM "
        "with `strop up`, which works round this for the CPU build",
    ),
    (
        r"(?:ModuleNotFoundError|ImportError): (.+)",
        "a package is missing or does not fit the others: {0}; install the pinned requirements",
    ),
    (
        r"argument --max-lora-rank: invalid choice: (\S+) \(choose from ([\d, ]+)\)",
        "`vllm.max_lora_rank` is {0}, and must be one of {1}",
    ),
    (
        r"LoRA rank (\d+) is greater than max_lora_rank (\d+)",
        "an adapter has rank {0}, and vLLM was started for at most {1}; raise `vllm.max_lora_rank`",
    ),
    (
        r"[Ii]nvalid tool call parser: (\S+)",
        "there is no tool parser named {0}; see `vllm serve --help=tool-call-parser` for those "
        "that there are, and set `vllm.tool_parser`",
    ),
    (
        r"error: (unrecognized arguments: .+|argument .+)",
        "vLLM does not take its command line ({0}); correct `vllm.extra_args`",
    ),
]


def explain_failure(log: str, returncode: int) -> str:
    """One sentence about why vLLM ended, and what to do about it.

    Args:
        log: its output since it was started.
        returncode: of the process; negative for a signal.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    for pattern, sentence in _CAUSES:
        if found := re.search(pattern, plain):
            return sentence.format(*found.groups())
    if returncode == -9:
        return (
            "it was killed (signal 9), on most machines for lack of memory; take a smaller model, "
            "or lower `vllm.kv_cache_memory_bytes`"
        )
    return _last_error(plain) or f"it ended with code {returncode} and said nothing about why"


def _last_error(log: str) -> str:
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
