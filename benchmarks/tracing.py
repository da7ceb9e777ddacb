"""What sending traces to Langfuse costs requests: strop with it and without, turn by turn.

    python -m benchmarks.tracing [--rounds 5] [--seconds 5] [--quick]

Two gateways stand in front of one canned upstream; load goes to one and then to the other, so that
whatever else happens on the machine meets both. Langfuse is a receiver that takes everything and
looks at nothing; it runs on the same cores. Behind every load the outbox is emptied, and what
that takes is shown too: sending goes on while requests are answered and after.
"""

import argparse
import asyncio
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.__main__ import run_case
from benchmarks.gateway.cases import Case
from benchmarks.gateway.servers import Server, started, strop, upstream
from gateway.backends.launch import free_port


class Receiver(asyncio.Protocol):
    """HTTP/1.1, as far as a sender of traces needs it."""

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
            del self._buffer[: end + 4 + length]
            self._transport.write(  # type: ignore[attr-defined]
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
            )


async def receive(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Receiver, "127.0.0.1", port)
    await server.serve_forever()


def waiting(database: Path) -> int:
    """Entries of the outbox."""
    with sqlite3.connect(database, timeout=60) as connection:
        return int(connection.execute("SELECT count(*) FROM langfuse_outbox").fetchone()[0])


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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--quick", action="store_true", help="a look, no figures to keep")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        uvloop.run(receive(options.receive))
        return
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    cases = (Case("json", 16), Case("stream", 16))
    found: dict[tuple[Case, bool], list[dict[str, Any]]] = {}
    sent: list[float] = []
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
            with environment(**{f"LANGFUSE_{name}": value for name, value in named}):
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
                    left, began = waiting(database), time.perf_counter()
                    while on and waiting(database) > 0:
                        time.sleep(0.05)
                    if on and left:
                        sent.append(left / (time.perf_counter() - began))
                    print(
                        f"{case!s:>11} Langfuse {servers[on].name:<3} {row['per_second']:6.0f}/s "
                        f"p50 {row['p50_ms']:6.2f} p99 {row['p99_ms']:6.2f} ms  "
                        f"CPU {row['cpu_ms']:.2f} ms  left {left}",
                        flush=True,
                    )
    for case in cases:
        for figure in ("per_second", "cpu_ms"):
            off, on_ = (
                statistics.median(r[figure] for r in found[case, on]) for on in (False, True)
            )
            print(f"{case!s:>11} {figure}: on {on_:.2f} ÷ off {off:.2f} = {on_ / off:.3f}")
    if sent:
        print(f"sent afterwards: {statistics.median(sent):.0f} completions/s")


if __name__ == "__main__":
    main()
