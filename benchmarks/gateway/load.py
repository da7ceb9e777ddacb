"""Load: clients on kept connections, each asking again when it has its answer whole.

JSON is asked for with wrk where that is installed. Everything else, and everything where it is
not, with the client below, which reads no more of an answer than where it ends.
"""

import asyncio
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

_WRK = """
wrk.method, wrk.body = "POST", {body}
wrk.headers["content-type"], wrk.headers["authorization"] = "application/json", "Bearer none"
done = function(summary, latency, requests)
  local e = summary.errors
  io.stderr:write(string.format(
    '{{"requests": %d, "seconds": %f, "p50": %f, "p99": %f, "failed": %d}}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3,
    latency:percentile(99) / 1e3, e.status + e.connect + e.read + e.write + e.timeout))
end
"""


@dataclass
class Load:
    """What came of it."""

    seconds: float = 0.0
    times: list[float] = field(default_factory=list)
    """Seconds that each request took."""
    first: list[float] = field(default_factory=list)
    """Seconds until the first event of each stream."""
    events: int = 0
    reads: int = 0
    """Pieces in which the events came."""
    summary: dict[str, float] | None = None
    """What wrk found instead of single times."""

    def figures(self) -> dict[str, float]:
        """Requests, requests per second, milliseconds."""
        if self.summary is not None:
            return self.summary
        times = sorted(self.times)
        found = {
            "requests": len(times),
            "per_second": len(times) / self.seconds,
            "p50_ms": 1e3 * statistics.median(times),
            "p99_ms": 1e3 * times[int(0.99 * (len(times) - 1))],
        }
        if self.first:
            found["first_p50_ms"] = 1e3 * statistics.median(self.first)
            found["chunks_per_second"] = self.events / self.seconds
            found["alone"] = min(1.0, self.reads / self.events)
        return found


class Client(asyncio.Protocol):
    """One connection: sends the next request when the last has been answered."""

    def __init__(self, requests: Iterator[bytes], load: Load, done: "asyncio.Future[None]"):
        self._requests = requests
        self._load = load
        self._done = done
        self._left = -1
        """Bytes of the body that are still to come; -1 before the head, -2 in a chunked body."""
        self._first = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            self._done.set_result(None)
            return
        self._left, self._first, self._head = -1, False, b""
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._left == -1:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._head[:end].lower(), self._head[end + 4 :]
            if not head.startswith(b"http/1.1 200"):
                self._fail(f"an answer was not 200: {self._head[:300]!r}")
                return
            at = head.find(b"content-length:")
            self._left = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else -2
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._answered()
            return
        if events := data.count(b"data: "):
            self._load.events += events
            self._load.reads += 1
            if not self._first:
                self._first = True
                self._load.first.append(time.perf_counter() - self._began)
        if data.endswith(b"0\r\n\r\n"):
            self._answered()

    def _answered(self) -> None:
        self._load.times.append(time.perf_counter() - self._began)
        self._next()

    def _fail(self, message: str) -> None:
        if not self._done.done():
            self._done.set_exception(SystemExit(message))
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(SystemExit(f"a connection was closed: {error}"))


def ask(port: int, clients: list[Iterator[bytes]]) -> Load:
    """Let all clients ask what they have to ask."""
    load = Load()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[None]] = [loop.create_future() for _ in clients]
        began = time.perf_counter()
        for requests, end in zip(clients, ends, strict=True):
            await loop.create_connection(
                lambda requests=requests, end=end: Client(requests, load, end),  # type: ignore[misc]
                "127.0.0.1",
                port,
            )
        await asyncio.gather(*ends)
        load.seconds = time.perf_counter() - began

    uvloop.run(run())
    return load


def again_for(request: bytes, seconds: float) -> Iterator[bytes]:
    """The same request until the time is up, and at least once."""
    until = time.perf_counter() + seconds
    yield request
    while time.perf_counter() < until:
        yield request


def json_load(port: int, request: bytes, connections: int, seconds: float) -> Load:
    """Short JSON requests for some seconds."""
    wrk = shutil.which("wrk")
    if wrk is None or seconds < 1:
        return ask(port, [again_for(request, seconds) for _ in range(connections)])
    body = request.split(b"\r\n\r\n", 1)[1].decode()
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK.format(body=json.dumps(body)))
        script.flush()
        command = [wrk, "-t1", f"-c{connections}", f"-d{round(seconds)}s", "--timeout", "60s"]
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        done = subprocess.run(
            [*command, "-s", Path(script.name), url], capture_output=True, text=True, check=True
        )
    found: dict[str, Any] = json.loads(done.stderr)
    if found["failed"]:
        raise SystemExit(f"wrk: {found}")
    if not found["requests"]:
        # Slower than the time it was given: each asks once, however long that takes.
        return ask(port, [again_for(request, 0) for _ in range(connections)])
    return Load(
        summary={
            "requests": found["requests"],
            "per_second": found["requests"] / found["seconds"],
            "p50_ms": found["p50"],
            "p99_ms": found["p99"],
        }
    )
