"""What vLLM 0.32 said when it was made to fail, and what strop makes of it."""

import pytest

from gateway.backends.failures import explain_failure

NOISE = """\
(APIServer pid=12) WARNING 12-01 15:01:25 [system_utils.py:255] Found ulimit of 20000 and failed to \
automatically increase. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.
Traceback (most recent call last):
  File "vllm/entrypoints/cli/main.py", line 170, in main
"""
HOLLOW = """\
(APIServer pid=12) RuntimeError: Engine core initialization failed. See root cause above. \
Failed core proc(s): {}
"""

CASES = {
    "port": (
        "OSError: [Errno 98] Address already in use",
        "its port is taken; stop what listens there, or set `vllm.port`",
    ),
    "rank": (
        "main.py serve: error: argument --max-lora-rank: invalid choice: 7 (choose from 1, 8, 16, "
        "32, 64, 128, 256, 320, 512)",
        "`vllm.max_lora_rank` is 7, and must be one of 1, 8, 16, 32",
    ),
    "argument": (
        "usage: vllm serve [model_tag] [options]\n"
        "main.py serve: error: unrecognized arguments: --no-such-flag",
        "vLLM does not take its command line (unrecognized arguments: --no-such-flag)",
    ),
    "no folder": (
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
        "'namespace/repo_name': '/models/absent'. Use `repo_type` argument if needed.",
        "/models/absent is no model folder and no name on the hub; set `base_model`",
    ),
    "no config": (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Invalid repository ID or local directory specified: 'models/half'.\n"
        "Please verify the following requirements:",
        "models/half is no model folder and no name on the hub",
    ),
    "architecture": (
        "  Value error, Model architectures ['FooForCausalLM'] are not supported for now. "
        "Supported architectures: dict_keys(['AfmoeForCausalLM'])",
        "this vLLM does not support the model's architecture 'FooForCausalLM'",
    ),
    "model type": (
        "  Value error, The checkpoint you are trying to load has model type `foo` but "
        "Transformers does not recognize this architecture.",
        "neither vLLM nor transformers knows the model type foo",
    ),
    "no weights": (
        "(EngineCore pid=34) RuntimeError: Cannot find any model weights with `models/half`\n"
        + HOLLOW,
        "models/half holds no weights",
    ),
    "cut weights": (
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: "
        "incomplete metadata, file not fully covered\n" + HOLLOW,
        "the model's weights are damaged (Error while deserializing header: incomplete metadata",
    ),
    "tokenizer": (
        "ValueError: Couldn't instantiate the backend tokenizer from one of: ",
        "the model's tokenizer cannot be loaded",
    ),
    "length": (
        "  Value error, User-specified max_model_len (100000) is greater than the derived "
        "max_model_len (max_position_embeddings=8192.0 or model_max_length=None in model's "
        "config.json).",
        "`vllm.max_model_len` is 100000, and the model has 8192 positions; lower it",
    ),
    "cache too small": (
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine\n" + HOLLOW,
        "no memory is left for the KV cache; raise `vllm.kv_cache_memory_bytes`",
    ),
    "cache too large": (
        "ValueError: Available memory on node 0 (13.7/16.09 GiB) on kv cache allocation is less "
        "than requested memory for kv (8381.9 GiB). Decrease --kv-cache-memory-bytes\n" + HOLLOW,
        "the KV cache of 8381.9 GiB does not fit into the 13.7 GiB of free memory",
    ),
    "parser": (
        "KeyError: 'invalid tool call parser: nope (chose from { hermes,llama3_json })'",
        "there is no tool parser named nope",
    ),
    "metadata": (
        "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm",
        "the package vllm is missing, or installed under another name",
    ),
    "memory": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 9000000000 bytes.\n" + HOLLOW,
        "out of memory; lower `vllm.kv_cache_memory_bytes`",
    ),
    "unknown": (
        "(EngineCore pid=34) ERROR 12-01 15:03:25 [core.py:1510] ValueError: something new\n"
        + HOLLOW
        + "  warnings.warn('resource_tracker: There appear to be 1 leaked semaphore objects')",
        "ValueError: something new",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_failure_is_explained_in_one_sentence(case: str) -> None:
    log, sentence = CASES[case]
    explained = explain_failure(NOISE + log, 1)
    assert explained.startswith(sentence)
    assert "\n" not in explained


def test_killed_process_is_most_likely_out_of_memory() -> None:
    assert explain_failure(NOISE, -9).startswith("it was killed (signal 9)")


def test_killed_engine_is_told_from_one_that_failed() -> None:
    refused = "ValueError: LoRA rank 16 is greater than max_lora_rank 8.\n"
    gone = (
        "(APIServer pid=12) WARNING 12-01 15:06:22 [core_client.py:817] [shutdown] MPClient: engine "
        "core exited unexpectedly; starting cleanup\n"
        "(APIServer pid=12) ERROR 12-01 15:06:22 [async_llm.py:906] vllm.v1.engine.exceptions."
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root "
        "cause.\n"
    )
    fatal = (
        "(EngineCore pid=34) ERROR 12-01 15:06:22 [core.py:1519] EngineCore encountered a fatal "
        "error.\n(EngineCore pid=34) ERROR 12-01 15:06:22 [core.py:1519] "
        "vllm.exceptions.LoRAAdapterNotFoundError: Loading lora p@1 failed\n"
    )
    assert explain_failure(refused + gone, 0).startswith("it was killed (signal 9)")
    found = explain_failure(fatal + gone, 0)
    assert found == "vllm.exceptions.LoRAAdapterNotFoundError: Loading lora p@1 failed"


def test_last_cause_counts() -> None:
    refused = "ValueError: LoRA rank 16 is greater than max_lora_rank 8.\n"
    assert "its port is taken" in explain_failure(refused + CASES["port"][0], 1)


def test_silent_end_is_still_explained() -> None:
    assert explain_failure("", 3) == "it ended with code 3 and said nothing about why"
