"""What strop costs on top of the model server, beside nginx and LiteLLM's proxy.

    python -m benchmarks.gateway [--json FILE] [--quick] [--memory] [--processes N]

One canned upstream (`benchmarks.canned`), and in front of it, all running at the same time and
measured in turn: nothing, nginx as pass-through, strop with its log on SQLite and on PostgreSQL
(every completion durable before its reply), and LiteLLM's proxy without any log. One process each,
or N: `--workers N` of strop, as many of nginx and of LiteLLM; the upstream stays one process.
Figures hold for the machine and the moment; the ratios between rows of one run are what to compare.
Every case is measured in several rounds, and each figure is the median of its rounds.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.gateway import report
from benchmarks.gateway.cases import CASES, TURNS, Case, conversation, short
from benchmarks.gateway.load import Load, again_for, ask, json_load
from benchmarks.gateway.memory import measure_memory
from benchmarks.gateway.servers import Server, all_of_them

ANSWER = "a" * 16
"""What the upstream says in 16 tokens."""


def run_case(case: Case, server: Server, seconds: float, number: int) -> Load:
    """Ask one server for what the case is about."""
    if case.kind == "json":
        return json_load(server.port, short(), case.connections, seconds)
    if case.kind == "stream":
        request = short(stream=True)
        return ask(server.port, [again_for(request, seconds) for _ in range(case.connections)])
    load = Load()
    began = number
    # A second is about what some conversations take; the last turn of each is what counts.
    for number in range(began, began + max(2, round(4 * seconds))):
        *turns, last = conversation(number, ANSWER)
        before = ask(server.port, [iter([*turns, last])])
        load.times.append(before.times[-1])
        load.seconds += before.seconds
    return load


def measure(case: Case, server: Server, seconds: float, number: int) -> dict[str, Any]:
    """Figures of one case, one server, one round."""
    used = server.cpu()
    load = run_case(case, server, seconds, number)
    used = server.cpu() - used
    found = load.figures()
    requests = found["requests"] * (TURNS if case.kind == "conversation" else 1)
    found["cpu_ms"] = 1e3 * used / requests
    if "chunks_per_second" in found:
        found["chunks_per_core_second"] = load.events / max(used, 0.01)
    return found


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Each figure's median."""
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case and round")
    parser.add_argument("--rounds", type=int, default=3, help="of each case")
    parser.add_argument("--chunks", type=int, default=256, help="of each stream")
    parser.add_argument("--gap", type=float, default=20.0, help="milliseconds between two chunks")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--processes", type=int, default=1, help="of each way")
    parser.add_argument("--without-litellm", action="store_true", help="it takes long")
    parser.add_argument("--quick", action="store_true", help="a look, no figures to keep")
    parser.add_argument("--memory", action="store_true", help="the memory run instead")
    parser.add_argument("--requests", type=int, default=200_000, help="of the memory run")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.memory:
        result: Any = measure_memory(options.requests)
    else:
        result = measure_speed(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    quick: bool = options.quick
    seconds = 0.2 if quick else options.seconds
    chunks, gap = (16, 1.0) if quick else (options.chunks, options.gap)
    rows: list[dict[str, Any]] = []
    without = quick or options.without_litellm
    with all_of_them(chunks, gap, without, options.processes) as servers:
        for case in CASES:
            if not str(case).startswith(options.only):
                continue
            rounds: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
            for server in () if quick else servers:
                run_case(case, server, min(1.0, seconds), 0)
            for number in range(1 if quick else options.rounds):
                for server in servers:
                    rounds[server.name].append(measure(case, server, seconds, 1_000 * (1 + number)))
            found = [
                {"case": str(case), "through": name, **medians(of_one)}
                for name, of_one in rounds.items()
            ]
            report.show(found)
            rows += found
    figures = report.figures(rows)
    report.show_figures(figures)
    return {"processes": options.processes, "rows": rows, "figures": figures}


if __name__ == "__main__":
    main()
