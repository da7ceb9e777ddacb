"""Why a vLLM did not start, or died: one sentence from its log, and what to do about it."""

import re
import signal

_CAUSES: list[tuple[str, str]] = [
    (
        r"Address already in use",
        "its port is taken; stop what listens there, or set `vllm.port` to another (0: a free one)",
    ),
    (
        r"([\d.]+ GiB) KV cache is needed, which is larger than the available KV cache memory "
        r"\(([\d.]+ GiB)\)",
        "one sequence of full length needs {0} of KV cache, and there are {1}; lower "
        "`vllm.max_model_len`, or raise `vllm.kv_cache_memory_bytes`",
    ),
    (
        r"No available memory for the cache blocks",
        "no memory is left for the KV cache; raise `vllm.kv_cache_memory_bytes` (CPU) or "
        "`vllm.gpu_memory_utilization` (GPU)",
    ),
    (
        r"Available memory on node \d+ \(([\d.]+)/.*requested memory for kv \(([\d.]+ GiB)\)",
        "the KV cache of {1} does not fit into the {0} GiB of free memory; lower "
        "`vllm.kv_cache_memory_bytes` or `vllm.max_model_len`",
    ),
    (
        r"CUDA out of memory|CUDA error: out of memory|less than desired GPU memory utilization",
        "out of GPU memory; stop what else uses the GPU, or lower `vllm.gpu_memory_utilization` "
        "or `vllm.max_model_len`",
    ),
    (
        r"MemoryError|bad_alloc|can't allocate memory|Cannot allocate memory|not enough memory",
        "out of memory; lower `vllm.kv_cache_memory_bytes`, `vllm.max_model_len` or "
        "`vllm.max_num_seqs`, or take a smaller model",
    ),
    (
        r"Model architectures \[([^\]]+)\] are not supported for now",
        "this vLLM does not support the model's architecture {0}; take another model, or a newer "
        "vLLM",
    ),
    (
        r"model type `([^`]+)` but Transformers does not recognize",
        "neither vLLM nor transformers knows the model type {0} of its config.json; take another "
        "model, or newer packages",
    ),
    (
        r"(\w+) does not support LoRA yet",
        "this vLLM cannot serve adapters on {0}; take another model",
    ),
    (
        r"max_model_len \((\d+)\) is greater than the derived max_model_len "
        r"\([\w=]+?=(\d+)",
        "`vllm.max_model_len` is {0}, and the model has {1} positions; lower it",
    ),
    (
        r"Invalid repository ID or local directory specified: '([^']+)'"
        r"|Repo id must be in the form [^:]*: '([^']+)'"
        r"|(\S+) is not a local folder and is not a valid model identifier",
        "{0} is no model folder and no name on the hub; set `base_model` to a folder with a "
        "config.json, or to a name such as Qwen/Qwen3-0.6B",
    ),
    (
        r"Cannot find any model weights with `([^`]+)`",
        "{0} holds no weights; finish the download, or set `base_model` to another folder",
    ),
    (
        r"SafetensorError: (.+)",
        "the model's weights are damaged ({0}); download or unpack the model again",
    ),
    (
        r"Can't load tokenizer for '([^']+)'|Couldn't instantiate the backend tokenizer",
        "the model's tokenizer cannot be loaded; put the tokenizer files of the model into its "
        "folder",
    ),
    (
        r"LocalEntryNotFoundError|OfflineModeIsEnabled|Temporary failure in name resolution"
        r"|ConnectError|couldn't connect to",
        "the model hub cannot be reached; set `base_model` to a local folder, or check the network",
    ),
    (
        r"PackageNotFoundError: No package metadata was found for (\S+)",
        "the package {0} is missing, or installed under another name; install it, or start vLLM "
        "with `strop up`, which works round this for the CPU build",
    ),
    (
        r"(?:ModuleNotFoundError|ImportError): (.+)",
        "a package is missing or does not fit the others ({0}); install the pinned requirements",
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
        r"invalid tool call parser: (\S+)",
        "there is no tool parser named {0}; set `vllm.tool_parser` to one that "
        "`vllm serve --help=tool-call-parser` names",
    ),
    (
        r"error: (unrecognized arguments: .+|argument .+)",
        "vLLM does not take its command line ({0}); correct `vllm.extra_args`",
    ),
]

_LINES = 400
"""How much of the end of a log is looked at; vLLM's longest stack traces have 150 lines."""

_ERROR_LINE = re.compile(
    r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b(?::.*)?)$"
)
_KILLED = (
    "it was killed (signal 9), on most machines for lack of memory; take a smaller model, or lower "
    "`vllm.kv_cache_memory_bytes`"
)
_HOLLOW = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineDeadError",
)
"""Errors that only say that there was another one."""


def explain_failure(log: str, returncode: int) -> str:
    """One sentence about why vLLM ended, and what to do about it.

    Args:
        log: its output since it was started.
        returncode: of the process; negative for a signal.
    """
    plain = "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", log).splitlines()[-_LINES:])
    engine_gone = "engine core exited unexpectedly" in plain
    # Whoever kills leaves no word in the log. The model runs in a process of its own, and a fatal
    # error of its own making is announced as one.
    if returncode == -signal.SIGKILL or (engine_gone and "a fatal error" not in plain):
        return _KILLED
    known = [
        (found.start(), sentence, found)
        for pattern, sentence in _CAUSES
        for found in re.finditer(pattern, plain)
    ]
    if known:
        # Refused adapters leave errors behind too, and a server that ends does so with its last.
        _, sentence, found = max(known, key=lambda one: one[0])
        return sentence.format(*filter(None, found.groups()))
    return _last_error(plain) or f"it ended with code {returncode} and said nothing about why"


def _last_error(log: str) -> str:
    """The last line that names an error, else the last line."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    for line in reversed(lines):
        found = _ERROR_LINE.search(line)
        if found and not any(hollow in line for hollow in _HOLLOW):
            return found[1]
    return lines[-1].strip() if lines else ""
