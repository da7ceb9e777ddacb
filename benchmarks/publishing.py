"""Optimiser step done → first completion under the new version, on the real vLLM.

    python -m benchmarks.publishing [--versions 5] [--json FILE]

Starts strop as the demo does, with the demo's agent and four questions a step. As soon as the alias
has moved, a completion of one token is asked for. The time is counted from the end of the
optimiser's work, by what the trainer recorded: all that it did afterwards (the probe's logprobs,
writing and recording the version) and its probe from before the step, which is in the same number,
are counted in. What vLLM's own load took is taken out, as the publisher measured it.
"""

import argparse
import asyncio
import json
import sqlite3
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from openai import AsyncOpenAI

from examples.email_search.demo import POLICY, SETTINGS, Demo, Strop, free_port, unpack_model
from examples.email_search.demo import progress_bar as bar
from examples.email_search.mailbox import make_mailbox

QUESTIONS, ROLLOUTS = 4, 6


async def measure(versions: int, folder: Path) -> list[dict[str, Any]]:
    """One step after the other; what each version's way to its first completion took."""
    settings = SETTINGS.format(
        policy=POLICY,
        concurrency=16,
        questions=QUESTIONS,
        rollouts=ROLLOUTS,
        learning_rate=3e-4,
    )
    strop = Strop(folder, settings, free_port())
    first: dict[int, float] = {}
    try:
        async with (
            httpx.AsyncClient(base_url=strop.url, timeout=60) as http,
            AsyncOpenAI(base_url=strop.url + "/v1", api_key="none", timeout=600) as client,
        ):
            await strop.ready(http)
            demo = Demo(strop.url, 0, make_mailbox(0), http, client)
            asking = asyncio.create_task(ask(http, client, first, versions))
            with bar() as progress:
                await demo.train(versions, QUESTIONS, ROLLOUTS, progress)
            await asking
    finally:
        strop.stop()
    return parts(folder / "strop.db", first)


async def ask(
    http: httpx.AsyncClient, client: AsyncOpenAI, first: dict[int, float], versions: int
) -> None:
    """Ask for one token under each new version as soon as it is the alias; when it came."""
    known = 0
    while known < versions:
        alias = (await http.get(f"/v1/policies/{POLICY}")).json()["alias"]
        if alias > known:
            reply = await client.chat.completions.create(
                model=POLICY, messages=[{"role": "user", "content": "Hello"}], max_tokens=1
            )
            known = int(reply.model.rpartition("@")[2])
            first[known] = time.time()
        await asyncio.sleep(0.02)


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
