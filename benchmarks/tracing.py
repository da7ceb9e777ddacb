"""What sending traces to Langfuse costs requests: strop with it and without, turn by turn.

    python -m benchmarks.tracing [--rounds 12] [--seconds 2] [--case json|stream] [--lag SECONDS]
                                 [--quick]

Two gateways stand in front of one canned upstream; load goes to one and then to the other, so that
whatever else happens on the machine meets both, and each figure is the median of the rounds' own
ratios. Langfuse is a receiver that keeps everything and looks at it when all is over; it runs on
the same cores. Sending goes on while requests are answered and after: behind every load the outbox
is emptied, and how long that takes is shown. With `--lag` below `--seconds` most of each load goes
on after sending has stopped to hold back. In the end what the receiver has is counted.
"""

import argparse
import asyncio
import gzip
import os
import sqlite3
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.__main__ import run_case
from benchmarks.gateway.cases import Case
from benchmarks.gateway.servers import Server, started, strop, upstream
from gateway.backends.launch import free_port

_KEPT: list[bytes] = []
"""Bodies that were sent to the receiver's traces."""


def generations() -> int:
    """How many different completions are in what was received."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = set()
    for body in _KEPT:
        for resource in ExportTraceServiceRequest.FromString(gzip.decompress(body)).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {a.key: a.value.string_value for a in span.attributes}
                if values["langfuse.observation.type"] == "generation":
                    found.add(values["langfuse.observation.metadata.completion_id"])
    return len(found)


class Receiver(asyncio.Protocol):
    """HTTP/1.1, as far as a sender of traces needs it; `GET /generations` counts what it has."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            if head.startswith(b"post "):
                _KEPT.append(bytes(self._buffer[end + 4 : end + 4 + length]))
            del self._buffer[: end + 4 + length]
            body = str(generations()).encode() if head.startswith(b"get /generations") else b"{}"
            self._transport.write(  # type: ignore[attr-defined]
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )


async def receive(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", port)
    await server.serve_forever()


def count(database: Path, table: str) -> int:
    """Rows of a table."""
    with sqlite3.connect(database, timeout=60) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def emptied(database: Path) -> tuple[int, float]:
    """How many entries the outbox has, and the seconds until it has none."""
    began = time.perf_counter()
    left = count(database, "langfuse_outbox")
    while count(database, "langfuse_outbox") > 0:
        time.sleep(0.05)
    return left, time.perf_counter() - began


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables that a process gets which is started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cpu(server: Server) -> float:
    """CPU seconds of the gateway itself, without the process that sends."""
    times = server.process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--case", choices=["json", "stream"], help="only one of them")
    parser.add_argument("--lag", type=float, help="lag_seconds; as by default if not given")
    parser.add_argument("--quick", action="store_true", help="a look, no figures to keep")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        uvloop.run(receive(options.receive))
        return
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    cases = [Case(each, 16) for each in ("json", "stream") if options.case in (None, each)]
    found: dict[tuple[Case, bool], list[dict[str, Any]]] = {}
    behind: dict[Case, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        to = stack.enter_context(upstream(64, 0.0)).port
        port = free_port()
        command = (sys.executable, "-m", "benchmarks.tracing", "--receive", str(port))
        stack.enter_context(started("receiver", port, "/", *command))
        servers = {}
        for on in (False, True):
            keys = ("pk", "sk", f"http://127.0.0.1:{port}") if on else ("", "", "")
            named = zip(("PUBLIC_KEY", "SECRET_KEY", "BASE_URL"), keys, strict=True)
            values = {f"LANGFUSE_{name}": value for name, value in named}
            if options.lag is not None:
                values["STROP_LANGFUSE__LAG_SECONDS"] = str(options.lag)
            with environment(**values):
                name = "on" if on else "off"
                servers[on] = stack.enter_context(strop(to, folder / name, name))
        database = folder / "on" / "strop" / "strop.db"
        for number in range(rounds):
            for case in cases:
                # Neither is always the first.
                for on in (False, True) if number % 2 else (True, False):
                    used = cpu(servers[on])
                    row = run_case(case, servers[on], seconds, number).figures()
                    row["cpu_ms"] = 1e3 * (cpu(servers[on]) - used) / row["requests"]
                    found.setdefault((case, on), []).append(row)
                    left, seconds_more = emptied(database) if on else (0, 0.0)
                    if on:
                        behind.setdefault(case, []).append(seconds_more)
                    print(
                        f"{case!s:>11} Langfuse {servers[on].name:<3} {row['per_second']:6.0f}/s "
                        f"p50 {row['p50_ms']:6.2f} p99 {row['p99_ms']:6.2f} ms  "
                        f"CPU {row['cpu_ms']:.2f} ms  left {left}, {seconds_more:.1f} s",
                        flush=True,
                    )
        logged = count(database, "completions")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/generations", timeout=60) as answer:
            received = int(answer.read())
    for case in cases:
        for figure in ("per_second", "cpu_ms", "p50_ms", "p99_ms"):
            rows = [(on[figure], off[figure]) for on, off in zip(*both(found, case), strict=True)]
            ratios = sorted(on / off for on, off in rows)
            on_, off_ = (statistics.median(each) for each in zip(*rows, strict=True))
            print(
                f"{case!s:>11} {figure}: on {on_:.2f}, off {off_:.2f}, on ÷ off "
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )
        slow = sorted(behind[case])
        print(f"{case!s:>11} sent {statistics.median(slow):.1f} s after, at most {slow[-1]:.1f} s")
    print(f"in the receiver {received} ÷ logged {logged} = {received / logged}")


def both(found: dict[Any, list[dict[str, Any]]], case: Case) -> tuple[Any, Any]:
    """The rows with Langfuse and without, round by round."""
    return found[case, True], found[case, False]


if __name__ == "__main__":
    main()
