"""What is started once for the whole session: the real base model, and the real vLLM on it."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event

from gateway.backends.launch import VllmOptions, explain_failure, prepare

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 240.0

# Hardly a test needs it, and each gateway that a test starts would import it.
os.environ.setdefault("STROP_PRELOAD_LITELLM", "false")


@event.listens_for(Engine, "before_cursor_execute")
def _refuse_to_write_while_reading(connection: Connection, _cursor, statement: str, *_) -> None:
    # On PostgreSQL it would be committed, on SQLite not.
    reading = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    verb = statement.split(maxsplit=1)[0].upper()
    assert not reading or verb not in ("INSERT", "UPDATE", "DELETE"), statement


@dataclass(frozen=True)
class RealVllm:
    """A vLLM that runs until the end of the session."""

    url: str
    model: str
    base_model: Path
    max_model_len: int
    log: Path


@pytest.fixture(scope="session")
def base_model() -> Path:
    """A real chat model's folder: `$STROP_TEST_BASE_MODEL`, or the small one from its package."""
    if given := os.environ.get("STROP_TEST_BASE_MODEL"):
        return Path(given)
    folder = ROOT / ".strop" / "models" / "smollm2-135m"
    command = [sys.executable, "-m", "trainer.base_model", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return folder


@pytest.fixture(scope="session")
def real_vllm(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    """The real vLLM, started the way `strop up` starts it; only for tests marked `vllm`."""
    with vllm_on(base_model, tmp_path_factory.mktemp("vllm"), max_model_len=1024) as running:
        yield running


@contextmanager
def vllm_on(base_model: Path, folder: Path, max_model_len: int) -> Iterator[RealVllm]:
    """A vLLM on a model, started the way `strop up` starts it."""
    # This model's template tells no parser; without one vLLM calls no tools, forced ones neither.
    options = VllmOptions(
        model=str(base_model),
        port=0,
        max_model_len=max_model_len,
        max_lora_rank=8,
        tool_parser="hermes",
    )
    launch = prepare(options, folder)
    log = folder / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command,
            env=launch.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, launch.url, log)
        yield RealVllm(launch.url, options.served_name, base_model, max_model_len, log)
    finally:
        _end_group(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT
    while not _healthy(url):
        if (code := process.poll()) is not None:
            reason = explain_failure(log.read_text(errors="replace"), code)
            pytest.fail(f"vLLM did not start: {reason} (log: {log})")
        if time.monotonic() > until:
            pytest.fail(f"vLLM was not ready after {START_TIMEOUT:g} s (log: {log})")
        time.sleep(0.25)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
