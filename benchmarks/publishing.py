"""Optimiser step done → first completion under the new version, on the real vLLM.

    python -m benchmarks.publishing [--versions 5] [--json FILE]

Starts strop as the demo does, with the demo's agent and four questions a step. As soon as the alias
has moved, a completion of one token is asked for, and nothing else. The time is counted from the
end of the optimiser's work, by what the trainer recorded; the probe's logprobs under the new
version, writing and recording it are in it. What vLLM's own load took is taken out.
"""

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from examples.email_search.demo import (
    POLICY,
    SETTINGS,
    Demo,
    progress_bar,
    serving,
    unpack_model,
)
from examples.email_search.mailbox import make_mailbox

QUESTIONS, ROLLOUTS = 4, 6


@dataclass
class AskingDemo(Demo):
    """The demo, which asks for one token as soon as a version is served, before it goes on."""

    first: dict[int, float] = field(default_factory=dict)
    """When each version's first completion came."""

    async def version(self, number: int) -> None:
        """Wait until a version is served, and ask for one token under it."""
        await super().version(number)
        reply = await self.client.chat.completions.create(
            model=POLICY, messages=[{"role": "user", "content": "Hello"}], max_tokens=1
        )
        assert reply.model == f"{POLICY}@{number}"
        self.first[number] = time.time()


async def measure(versions: int, folder: Path) -> list[dict[str, Any]]:
    """One step after the other; what each version's way to its first completion took."""
    settings = SETTINGS.format(
        policy=POLICY,
        concurrency=16,
        questions=QUESTIONS,
        rollouts=ROLLOUTS,
        learning_rate=3e-4,
    )
    async with serving(folder, settings) as (url, http, client):
        demo = AskingDemo(url, 0, make_mailbox(0), http, client)
        with progress_bar() as progress:
            await demo.train(versions, QUESTIONS, ROLLOUTS, progress)
    return parts(folder / "strop.db", demo.first)


def parts(database: Path, first: dict[int, float]) -> list[dict[str, Any]]:
    """By version, seconds from the end of the optimiser's work."""
    query = (
        "SELECT v.number, v.created_at, v.published_at, v.probe_result, s.metrics, s.finished_at"
        " FROM versions v JOIN steps s ON s.id = v.step_id ORDER BY v.number"
    )
    found = []
    with sqlite3.connect(database) as connection:
        for number, written, published, result, metrics, finished in connection.execute(query):
            phases = json.loads(metrics)["seconds_by_phase"]
            after = phases["save"] + phases["probe"]
            (proof,) = json.loads(result)["replicas"].values()
            total = first[number] - (finished - after)
            found.append(
                {
                    "version": number,
                    "written": after,
                    "published": published - written,
                    "first_completion": first[number] - published,
                    "load": proof["load_seconds"],
                    "total_beyond_load": total - proof["load_seconds"],
                }
            )
    return found


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser(description="From the optimiser to the first completion.")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    unpack_model()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options.versions, Path(folder)))
    for row in found:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    print(f"median beyond load: {median(row['total_beyond_load'] for row in found):.2f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
