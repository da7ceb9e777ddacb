"""`make demo`: an e-mail search agent gets better at its job while it is being used.

Starts strop (a real vLLM, the gateway, the trainer), asks the agent held-out questions, lets it
work on training questions and posts what each answer was worth, until the trainer has published a
number of new versions, and asks held-out questions again. Nothing here trains: the agent talks to
an OpenAI API, and rewards are POSTed against the ids of its completions.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import httpx
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from examples.email_search import report
from examples.email_search.agent import run_episode, score
from examples.email_search.mailbox import Mailbox, Question, make_mailbox

POLICY = "email-agent"
CONCURRENCY = 48
"""Rollouts at once: those of a whole step, so that vLLM decodes them together."""
TARGET = 0.7
"""Mean reward of a step's rollouts that the demo is timed to."""
MADE_HERE = ".made-by-demo"
MODEL = Path(".strop/models/smollm2-135m")
"""Unpacked once, and kept from one demo to the next."""
SETTINGS = """\
publish_poll = 0.2
keep_loaded = 1
# vLLM and the trainer both compute in float32 here: a version that is served as it was trained
# differs by about 1e-5 nats.
probe_tolerance = 0.0001

[vllm]
max_model_len = 1024
max_num_seqs = {concurrency}

[trainer]
poll_seconds = 0.1

[policies.{policy}]
groups_per_step = {questions}
group_size = {rollouts}
settle_seconds = 0.0

[policies.{policy}.training]
learning_rate = {learning_rate}
"""
console = Console(highlight=False)

Rewards = dict[str, list[float]]
"""Rewards of the rollouts of each question, by the question's id."""


@dataclass
class Rollout:
    """What one episode brought."""

    reward: float
    version: int
    """The version that it began with, and kept."""


@dataclass
class StepTimes:
    """One step, as the demo saw it."""

    reward: float
    """Mean of its rollouts."""
    began: float
    """Seconds from the first training rollout to this step's first one."""
    sampled: float
    """To its last one."""
    served: float
    """Until the version that it made was served."""


@dataclass
class Demo:
    """The running system, as its user sees it: a URL."""

    url: str
    seed: int
    mailbox: Mailbox
    http: httpx.AsyncClient
    client: AsyncOpenAI
    answered: int = 0
    rewards_by_version: dict[int, list[float]] = field(default_factory=dict)
    steps: list[StepTimes] = field(default_factory=list)

    async def rollout(self, question: Question, split: str, group: str, gate: asyncio.Semaphore):
        """Let the agent answer one question, and post what its answer was worth."""
        async with gate:
            episode = await run_episode(
                self.client, POLICY, question.text, self.mailbox, group=group, split=split
            )
        reward = score(question, episode)
        # The last completion of the episode: any of them would do, for the episode is rewarded
        # as a whole.
        posted = await self.http.post(
            "/v1/rewards",
            json={"completion_id": episode.completion_ids[-1], "reward": reward},
        )
        posted.raise_for_status()
        self.answered += len(episode.completion_ids)
        return Rollout(reward, episode.versions[0])

    async def evaluate(self, count: int, name: str, progress: Progress) -> Rewards:
        """`count` rollouts on held-out questions, sampled as served; rewards by question."""
        gate = asyncio.Semaphore(CONCURRENCY)
        questions = self.mailbox.held_out
        task = progress.add_task(f"held out, {name}", total=count, note="")
        rewards: Rewards = {}

        async def one(index: int) -> None:
            question = questions[index % len(questions)]
            rollout = await self.rollout(question, "eval", f"eval-{name}-{question.id}", gate)
            rewards.setdefault(question.id, []).append(rollout.reward)
            mean = fmean(reward for of_one in rewards.values() for reward in of_one)
            progress.update(task, advance=1, note=f"reward {mean:.2f}")

        await asyncio.gather(*(one(index) for index in range(count)))
        return rewards

    async def train(self, steps: int, questions: int, rollouts: int, progress: Progress) -> None:
        """Work on training questions until the trainer has published `steps` new versions."""
        gate = asyncio.Semaphore(CONCURRENCY)
        rng = random.Random(self.seed)
        pool: list[Question] = []
        task = progress.add_task("training", total=steps * questions * rollouts, note="")
        start = time.monotonic()
        for step in range(1, steps + 1):
            if len(pool) < questions:
                pool = rng.sample(self.mailbox.train, len(self.mailbox.train))
            batch = [pool.pop() for _ in range(questions)]
            done: list[Rollout] = []
            began = time.monotonic() - start

            async def one(question: Question, step: int, done: list[Rollout]) -> None:
                group = f"step-{step:02d}-{question.id}"
                done.append(await self.rollout(question, "train", group, gate))
                mean = fmean(rollout.reward for rollout in done)
                note = f"reward {mean:.2f} · step {step} of {steps} · @{step - 1} answers"
                progress.update(task, advance=1, note=note)

            await asyncio.gather(
                *(one(question, step, done) for question in batch for _ in range(rollouts))
            )
            for rollout in done:
                self.rewards_by_version.setdefault(rollout.version, []).append(rollout.reward)
            mean = fmean(rollout.reward for rollout in done)
            progress.update(
                task, note=f"reward {mean:.2f} · step {step} of {steps} · training @{step}"
            )
            sampled = time.monotonic() - start
            await self.version(step)
            self.steps.append(StepTimes(mean, began, sampled, time.monotonic() - start))

    async def version(self, number: int) -> None:
        """Wait until a version is served."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            policy = (await self.http.get(f"/v1/policies/{POLICY}")).json()
            if policy["alias"] >= number:
                return
            listing = (await self.http.get(f"/v1/policies/{POLICY}/versions")).json()["data"]
            for version in listing:
                if version["state"] == "failed":
                    raise SystemExit(f"{version['id']} failed its probe: {version['probe_result']}")
            await asyncio.sleep(0.05)
        raise SystemExit(
            f"version {number} was not published within 5 minutes; look at the trainer's log"
        )


def make_anew(folder: Path) -> None:
    """An empty folder; one that this demo did not make is not touched."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MADE_HERE).exists():
        raise SystemExit(f"{folder} holds something that the demo did not make; name another")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MADE_HERE).touch()


def unpack_model() -> None:
    """Make the folder of the small model that comes with strop, if it is not there."""
    command = [sys.executable, "-m", "trainer.base_model", str(MODEL)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the model could not be unpacked:\n{done.stderr}")


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Strop:
    """`strop up`, as a process of its own."""

    def __init__(self, folder: Path, settings: str, port: int):
        config = folder / "strop.toml"
        config.write_text(settings)
        self.url = f"http://127.0.0.1:{port}"
        env = {
            "STROP_BASE_MODEL": str(MODEL.absolute()),
            **os.environ,
            "STROP_CONFIG": str(config.absolute()),
            "STROP_DATA_DIR": str(folder.absolute()),
            "STROP_PORT": str(port),
            "STROP_VLLM__PORT": str(free_port()),
        }
        self.log = folder / "up.log"
        self._process = subprocess.Popen(
            [str(Path(sys.executable).with_name("strop")), "up"],
            env=env,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    async def ready(self, http: httpx.AsyncClient) -> None:
        """Wait until a request would be answered."""
        while True:
            if self._process.poll() is not None:
                raise SystemExit("strop did not start:\n" + self.log.read_text()[-2000:])
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)

    def stop(self) -> None:
        """Ctrl-C, and wait."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)


@asynccontextmanager
async def serving(
    folder: Path, settings: str
) -> AsyncIterator[tuple[str, httpx.AsyncClient, AsyncOpenAI]]:
    """strop, ready: its address, and clients of its own API and of OpenAI's."""
    strop = Strop(folder, settings, free_port())
    try:
        async with (
            httpx.AsyncClient(base_url=strop.url, timeout=60) as http,
            AsyncOpenAI(base_url=strop.url + "/v1", api_key="none", timeout=600) as client,
        ):
            await strop.ready(http)
            yield strop.url, http, client
    finally:
        strop.stop()


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole demo; returns what goes into result.json."""
    folder: Path = options.folder
    began = time.monotonic()
    console.print(f"Starting vLLM, the gateway and the trainer (seed {options.seed}) …")
    settings = SETTINGS.format(policy=POLICY, concurrency=CONCURRENCY, **vars(options))
    async with serving(folder, settings) as (url, http, client):
        console.print(f"Ready after {time.monotonic() - began:.0f} s at {url}")
        demo = Demo(url, options.seed, make_mailbox(options.seed), http, client)
        with progress_bar() as progress:
            base = await demo.evaluate(options.evaluate, "base", progress)
            await demo.train(options.steps, options.questions, options.rollouts, progress)
            last = await demo.evaluate(options.evaluate, "last", progress)
        versions = (await http.get(f"/v1/policies/{POLICY}/versions")).json()["data"]
    return {
        "seed": options.seed,
        **summary("base", base),
        **summary("last", last),
        "rewards_by_version": {
            str(version): fmean(rewards)
            for version, rewards in sorted(demo.rewards_by_version.items())
        },
        "steps": options.steps,
        "seconds_by_step": [asdict(step) for step in demo.steps],
        "target_reward": options.target,
        "seconds_to_target": seconds_to(options.target, demo.steps),
        "seconds": round(time.monotonic() - began, 1),
        "completions_answered": demo.answered,
        "completions_logged": report.completions_logged(folder),
        "served_trained_difference": report.largest_difference(versions),
    }


def seconds_to(target: float, steps: Sequence[StepTimes]) -> float | None:
    """Seconds of training until a step's rollouts earned the target; None if none did."""
    return next((step.sampled for step in steps if step.reward >= target), None)


def summary(name: str, rewards: Rewards) -> dict[str, Any]:
    """Mean reward over the questions and its 95% interval.

    Normal approximation, over the means of the questions: rollouts of one question are not
    independent of each other.
    """
    means = [fmean(of_one) for of_one in rewards.values()]
    half = 1.96 * stdev(means) / len(means) ** 0.5
    mean = fmean(means)
    return {
        f"{name}_reward": mean,
        f"{name}_interval": [mean - half, mean + half],
        f"{name}_rollouts": sum(len(of_one) for of_one in rewards.values()),
    }


def progress_bar() -> Progress:
    """The live display."""
    return Progress(
        TextColumn("{task.description:<15}"),
        BarColumn(12),
        TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def main() -> None:
    """Parse the options, run, show, and write result.json."""
    parser = argparse.ArgumentParser(description="The e-mail search agent gets better at its job.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="versions to train")
    parser.add_argument("--questions", type=int, default=8, help="questions (groups) per step")
    parser.add_argument("--rollouts", type=int, default=6, help="rollouts per question")
    parser.add_argument(
        "--target", type=float, default=TARGET, help="reward of a step that is timed"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--evaluate", type=int, default=160, help="held-out rollouts, twice")
    parser.add_argument("--folder", type=Path, default=Path(".strop/demo"), help="made anew")
    options = parser.parse_args()
    make_anew(options.folder)
    if "STROP_BASE_MODEL" not in os.environ:
        unpack_model()
    result = asyncio.run(run(options))
    (options.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    base_model = os.environ.get("STROP_BASE_MODEL", str(MODEL))
    report.show(result, options.folder, base_model, console)


if __name__ == "__main__":
    main()
