"""What strop costs on top of the model server, side by side with going there directly.

    python -m benchmarks.gateway [--json FILE] [--quick]

One load generator, keep-alive connections in a closed loop: each sends its next request when it has
the last answer whole. The upstream is `benchmarks.canned`. strop runs as `strop serve` does, with
its log on SQLite (WAL, synchronous FULL), every completion durable before its reply. Figures hold
for the machine and the moment; the ratios between rows of one run are what to compare.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from safetensors.numpy import save_file

from gateway.backends.launch import free_port

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "How much does Omar want for the sofa?"},
]


async def connection(port: int, request: bytes, until: float, times: list[float]) -> None:
    """One client: requests one after the other until the time is up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"an answer was not 200: {head[:200]!r}")
        lowered = head.lower()
        if b"transfer-encoding: chunked" in lowered:
            while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            at = lowered.index(b"content-length:") + 15
            await reader.readexactly(int(lowered[at:].split(b"\r\n", 1)[0]))
        times.append(time.perf_counter() - began)
    writer.close()


def load(port: int, connections: int, stream: bool, seconds: float) -> list[float]:
    """Seconds that each request took."""
    body = json.dumps({"model": "agent@0", "messages": MESSAGES, "stream": stream}).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    times: list[float] = []

    async def all_connections() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(connection(port, request, until, times) for _ in range(connections)))

    uvloop.run(all_connections())
    return times


@contextmanager
def process(*arguments: str, url: str, **env: str) -> Iterator[psutil.Process]:
    """A server, ready."""
    child = subprocess.Popen([sys.executable, *arguments], env={**os.environ, **env})
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(url, timeout=1) as response:
                    if response.status == 200:
                        break
            except OSError:
                time.sleep(0.05)
        else:
            raise SystemExit(f"{arguments} did not become ready")
        yield psutil.Process(child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(30)


def toy_base(folder: Path) -> Path:
    """A base model that is just large enough to have a layer."""
    folder.mkdir()
    save_file({"layers.0.q_proj.weight": np.zeros((8, 8), np.float32)}, folder / "m.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def measure(port: int, server: psutil.Process, case: dict[str, Any], seconds: float) -> Any:
    """Figures of one case."""
    load(port, case["connections"], case["stream"], min(0.5, seconds))
    before, began = sum(server.cpu_times()[:2]), time.perf_counter()
    times = load(port, case["connections"], case["stream"], seconds)
    wall, used = time.perf_counter() - began, sum(server.cpu_times()[:2]) - before
    times.sort()
    return {
        "requests": len(times),
        "per_second": len(times) / wall,
        "p50_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * times[int(0.99 * (len(times) - 1))],
        "cpu_ms": 1e3 * used / len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case")
    parser.add_argument("--chunks", type=int, default=64, help="of each stream")
    parser.add_argument("--quick", action="store_true", help="a look, no figures to keep")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    seconds = 0.3 if options.quick else options.seconds
    upstream_port, port = free_port(), free_port()
    upstream_url, url = f"http://127.0.0.1:{upstream_port}", f"http://127.0.0.1:{port}"
    canned = ("-m", "benchmarks.canned", "--port", str(upstream_port))
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        process(*canned, "--chunks", str(options.chunks), url=upstream_url) as upstream,
        process(
            "-m",
            "gateway.cli",
            "serve",
            url=url + "/readyz",
            STROP_DATA_DIR=f"{folder}/strop",
            STROP_BASE_MODEL=str(toy_base(Path(folder) / "base")),
            STROP_REPLICAS=json.dumps([upstream_url]),
            STROP_PORT=str(port),
            STROP_CONFIG=f"{folder}/none.toml",
        ) as strop,
    ):
        for stream in (False, True):
            for connections in (1, 16, 64):
                case = {"stream": stream, "connections": connections}
                for name, target, server in (
                    ("direct", upstream_port, upstream),
                    ("strop", port, strop),
                ):
                    rows.append({"through": name, **case, **measure(target, server, case, seconds)})
                show(rows[-2], rows[-1])
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def show(direct: dict[str, Any], strop: dict[str, Any]) -> None:
    """One line a case."""
    kind = "stream" if strop["stream"] else "JSON"
    print(
        f"{kind:>6} × {strop['connections']:<3} direct {direct['per_second']:8.0f}/s "
        f"p50 {direct['p50_ms']:6.2f} ms   strop {strop['per_second']:7.0f}/s "
        f"p50 {strop['p50_ms']:6.2f} p99 {strop['p99_ms']:6.2f} ms  CPU {strop['cpu_ms']:.2f} ms   "
        f"ratio {strop['per_second'] / direct['per_second']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
