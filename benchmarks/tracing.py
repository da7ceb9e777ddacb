"""What sending traces to Langfuse costs requests: strop with it and without, turn by turn.

    python -m benchmarks.tracing [--rounds 5] [--seconds 5] [--quick]

Two gateways stand in front of one canned upstream; load goes to one and then to the other, so that
whatever else happens on the machine meets both. Langfuse is a receiver that takes everything and
looks at nothing; it runs on the same cores. Behind every load the outbox is emptied, and what
that takes is shown too: sending goes on while requests are answered and after.
"""

import argparse
import asyncio
import json
import sqlite3
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.gateway import measure, process, toy_base
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--quick", action="store_true", help="a look, no figures to keep")
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        uvloop.run(receive(options.receive))
        return
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    upstream, receiver = free_port(), free_port()
    upstream_url, receiver_url = (f"http://127.0.0.1:{port}" for port in (upstream, receiver))
    ports = {"off": free_port(), "on": free_port()}
    found: dict[str, dict[bool, list[float]]] = {n: {False: [], True: []} for n in ports}
    sent: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        canned = ("-m", "benchmarks.canned", "--port", str(upstream))
        stack.enter_context(process(*canned, "--chunks", "64", url=upstream_url))
        takes = ("-m", "benchmarks.tracing", "--receive", str(receiver))
        stack.enter_context(process(*takes, url=receiver_url))
        base = str(toy_base(folder / "base"))
        servers = {}
        for name, port in ports.items():
            keys = {
                "LANGFUSE_PUBLIC_KEY": "pk" if name == "on" else "",
                "LANGFUSE_SECRET_KEY": "sk" if name == "on" else "",
                "LANGFUSE_BASE_URL": receiver_url if name == "on" else "",
            }
            servers[name] = stack.enter_context(
                process(
                    "-m",
                    "gateway.cli",
                    "serve",
                    url=f"http://127.0.0.1:{port}/readyz",
                    STROP_DATA_DIR=str(folder / name),
                    STROP_BASE_MODEL=base,
                    STROP_REPLICAS=json.dumps([upstream_url]),
                    STROP_PORT=str(port),
                    STROP_CONFIG=str(folder / "none.toml"),
                    **keys,
                )
            )
        database = folder / "on" / "strop.db"
        for number in range(rounds):
            for stream in (False, True):
                # Neither is always the first.
                for name in sorted(ports, reverse=number % 2 == 1):
                    case = {"stream": stream, "connections": 16}
                    row = measure(ports[name], servers[name], case, seconds)
                    found[name][stream].append(row["per_second"])
                    left, began = waiting(database), time.perf_counter()
                    while name == "on" and waiting(database) > 0:
                        time.sleep(0.05)
                    if name == "on" and left:
                        sent.append(left / (time.perf_counter() - began))
                    kind = "stream" if stream else "JSON"
                    print(
                        f"{kind:>6} × 16 Langfuse {name:<3} {row['per_second']:7.0f}/s "
                        f"p50 {row['p50_ms']:6.2f} p99 {row['p99_ms']:6.2f} ms  "
                        f"CPU {row['cpu_ms']:.2f} ms  left {left}",
                        flush=True,
                    )
    for stream, kind in ((False, "JSON"), (True, "stream")):
        off, on = (statistics.median(found[name][stream]) for name in ("off", "on"))
        print(f"{kind:>6}: on {on:.0f}/s ÷ off {off:.0f}/s = {on / off:.3f}")
    if sent:
        print(f"sent afterwards: {statistics.median(sent):.0f} completions/s")


if __name__ == "__main__":
    main()
