"""Whether memory grows with the requests that were answered.

Each request begins a new trajectory, the worst case for what the gateway remembers. What it
remembers is bounded (`gateway.capture.placement`), so memory stops growing there.
"""

import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.gateway.cases import MODEL, http_request
from benchmarks.gateway.load import ask
from benchmarks.gateway.servers import strop, upstream

_EARLY = 10_000
_CONNECTIONS = 16


def measure_memory(requests: int) -> dict[str, Any]:
    """Resident memory after 10,000 requests and after all of them, in bytes, and the ratio."""
    numbers = count()

    def some(many: int) -> Any:
        for _ in range(many):
            text = f"Question number {next(numbers)}: how much does Omar want for the sofa?"
            yield http_request({"model": MODEL, "messages": [{"role": "user", "content": text}]})

    with tempfile.TemporaryDirectory() as folder, upstream(16, 0) as direct:  # noqa: SIM117
        with strop(direct.port, Path(folder) / "strop", "strop") as server:
            found: dict[str, Any] = {}
            asked = 0
            for until in (_EARLY, *range(50_000, requests, 50_000), requests):
                ask(
                    server.port,
                    [some((until - asked) // _CONNECTIONS) for _ in range(_CONNECTIONS)],
                )
                asked = until
                found[str(until)] = server.rss()
                print(f"{until:>8} requests: {server.rss() / 2**20:7.1f} MiB", flush=True)
    found["ratio"] = found[str(requests)] / found[str(_EARLY)]
    print(f"memory after {requests} requests ÷ after {_EARLY}: {found['ratio']:.3f}")
    return found
