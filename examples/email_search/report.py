"""What `make demo` shows when it is done: a table, a plot, and where to look further."""

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table


def completions_logged(folder: Path) -> int:
    """Completions in the trajectory database that were answered to their end."""
    with sqlite3.connect(folder / "strop.db") as database:
        query = "SELECT count(*) FROM completions WHERE status = 'complete'"
        return int(database.execute(query).fetchone()[0])


def largest_difference(versions: Sequence[Mapping[str, Any]]) -> float:
    """Served against trained: the largest mean difference of any version's probe, in nats."""
    return max(
        (
            numbers["mean_difference"]
            for version in versions
            if version["probe_result"]
            for numbers in version["probe_result"]["replicas"].values()
            if "mean_difference" in numbers
        ),
        default=0.0,
    )


def time_to_target(result: Mapping[str, Any]) -> str:
    """When a step's rollouts first earned the target, and what a step took."""
    steps = result["seconds_by_step"]
    sampling = fmean(step["sampled"] - step["began"] for step in steps)
    training = fmean(step["served"] - step["sampled"] for step in steps)
    each = f"a step takes {sampling:.1f} s of rollouts and {training:.1f} s until it is served"
    seconds = result["seconds_to_target"]
    if seconds is None:
        best = max(step["reward"] for step in steps)
        return f"Training reward {result['target_reward']:g} not reached (best {best:.2f}); {each}"
    return f"Training reward {result['target_reward']:g} reached after {seconds:.0f} s; {each}"


def show(result: Mapping[str, Any], folder: Path, base_model: str, console: Console) -> None:
    """Print it."""
    table = Table(title="Held-out questions, sampled at temperature 1")
    for column in ("version", "rollouts", "mean reward", "95% interval"):
        table.add_column(column, justify="right")
    for name, version in (("base", "@0 (base)"), ("last", f"@{result['steps']}")):
        low, high = result[f"{name}_interval"]
        table.add_row(
            version,
            str(result[f"{name}_rollouts"]),
            f"{result[f'{name}_reward']:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    console.print()
    console.print(table)
    base = result["base_reward"]
    ratio = f"{result['last_reward'] / base:.2f} times the base" if base else "base was 0"
    console.print(
        f"{ratio}, after {result['steps']} steps and {result['seconds']:.0f} s; "
        f"{result['completions_logged']} of {result['completions_answered']} answered completions "
        f"logged; served and trained logprobs differ by at most "
        f"{result['served_trained_difference']:.1e} nats",
        soft_wrap=True,
    )
    console.print(time_to_target(result), soft_wrap=True)
    console.print()
    console.print("Mean reward on training questions, by the version that answered")
    top = max(*result["rewards_by_version"].values(), 1e-9)
    for version, reward in result["rewards_by_version"].items():
        bar = "█" * round(40 * reward / top)
        console.print(f"  @{version:<3} {bar:<40} {reward:.2f}")
    console.print()
    config = folder / "strop.toml"
    further = (
        f"cat {folder / 'result.json'}",
        f"STROP_CONFIG={config} STROP_DATA_DIR={folder} STROP_BASE_MODEL={base_model} "
        ".venv/bin/strop up",
        "and while that runs: .venv/bin/strop policy show email-agent, or http://localhost:8000/",
    )
    console.print("Look further:")
    for line in further:
        console.print(f"  {line}", soft_wrap=True)
