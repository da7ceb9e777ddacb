"""The rows as text, and the figures that are held against what is to be reached."""

from typing import Any

Row = dict[str, Any]

_STROP = "strop, SQLite"


def show(rows: list[Row]) -> None:
    """One line for each way, for one case."""
    print(f"\n{rows[0]['case']}")
    for row in rows:
        line = (
            f"  {row['through']:<18} {row['per_second']:9.1f}/s  p50 {row['p50_ms']:8.2f}  "
            f"p99 {row['p99_ms']:8.2f} ms  CPU {row['cpu_ms']:7.3f} ms"
        )
        if "chunks_per_second" in row:
            line += (
                f"  first {row['first_p50_ms']:7.2f} ms  {row['chunks_per_second']:7.0f} chunks/s, "
                f"{row['chunks_per_core_second']:7.0f} a core, {100 * row['alone']:3.0f}% alone"
            )
        print(line, flush=True)


def figures(rows: list[Row]) -> list[Row]:
    """What was reached of each figure, for strop on SQLite; those that could be measured."""
    by = {(row["case"], row["through"]): row for row in rows}

    def value(case: str, through: str, name: str) -> float:
        return float(by[case, through][name])

    def added(case: str, name: str = "p50_ms") -> float:
        return value(case, _STROP, name) - value(case, "direct", name)

    def rate(through: str) -> float:
        return value("json × 16", _STROP, "per_second") / value("json × 16", through, "per_second")

    wanted = [
        ("requests per second ÷ LiteLLM's, 16 connections", "≥ 60", lambda: rate("litellm")),
        ("requests per second ÷ nginx's, 16 connections", "≥ 0.167", lambda: rate("nginx")),
        ("p50 added at 1 connection, ms", "≤ 1", lambda: added("json × 1")),
        *(
            (
                f"chunks per second and core, {streams} streams",
                "≥ 20000",
                lambda streams=streams: value(
                    f"stream × {streams}", _STROP, "chunks_per_core_second"
                ),
            )
            for streams in (32, 256)
        ),
        (
            "time to the first token added, p50, 1 stream, ms",
            "≤ 1",
            lambda: added("stream × 1", "first_p50_ms"),
        ),
        (
            "p50 added to a request of 60 KB ÷ to a short one",
            "≤ 3",
            lambda: added("conversation × 1") / added("json × 1"),
        ),
    ]
    found: list[Row] = []
    for what, target, compute in wanted:
        try:
            found.append({"what": what, "target": target, "measured": compute()})
        except KeyError:
            continue
    return found


def show_figures(found: list[Row]) -> None:
    """The table at the end."""
    print()
    for figure in found:
        print(f"{figure['what']:<55} {figure['measured']:9.3f}   (to reach: {figure['target']})")
