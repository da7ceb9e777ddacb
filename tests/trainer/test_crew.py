"""Two processes take the step that one would take."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gateway.store import Database
from tests.trainer import tiny
from trainer import replay
from trainer.checkpoints import ADAPTER
from trainer.crew import deal
from trainer.worker import Visit, Worker

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 200.0


class Launched:
    """`accelerate launch -m trainer` with two processes on this CPU."""

    def __init__(self, log: tiny.Log, folder: Path, way: list[str]):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = [*way, "--num_processes", "2", "--num_machines", "1"]
        options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
        options += ["--main_process_port", str(port)]
        self.log = folder / "launch.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", "trainer"],
            env={
                **os.environ,
                "STROP_CONFIG": str(folder / "none.toml"),
                "STROP_DATA_DIR": str(folder),
                "STROP_DATABASE_URL": log.url,
                "STROP_TRAINER_DEVICE": "cpu",
                "STROP_TRAINER_POLL_SECONDS": "0.05",
                # One process gets two of the three groups, in a pass each, the other a large one.
                "STROP_TRAINER_TOKEN_BUDGET": "40",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT),
            },
            cwd=ROOT,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, condition, what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, f"{what}: {self.log.read_text()}"
            time.sleep(0.05)

    def alive(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def interrupt(self) -> int:
        """Ctrl-C, as a terminal sends it: to the launcher and to both of its processes."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        if self.alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def copy_of(log: tiny.Log, folder: Path) -> tiny.Log:
    folder.mkdir()
    source = sqlite3.connect(log.url.removeprefix("sqlite:///"))
    target = sqlite3.connect(folder / "strop.db")
    source.backup(target)
    target.close()
    source.close()
    other = tiny.Log.__new__(tiny.Log)
    other.__dict__.update(log.__dict__)
    other.url = f"sqlite:///{folder / 'strop.db'}"
    other.artifacts = folder / "artifacts"
    other.database = Database(other.url)
    return other


def adapter(log: tiny.Log) -> dict[str, torch.Tensor]:
    return load_file(Path(log.policy.head_path) / ADAPTER)


def metrics(log: tiny.Log) -> dict[str, float]:
    (row,) = log.rows("select metrics from steps")
    return json.loads(row[0])


@pytest.mark.parametrize(
    "way", [["--multi_gpu"], ["--use_fsdp", "--fsdp_version", "2"]], ids=["whole", "sharded"]
)
def test_two_processes_take_the_step_of_one_wait_for_more_and_end_cleanly(
    make_log, base_model, trainer_settings, tmp_path, way
):
    log = make_log(group_size=3, groups_per_step=3)
    for number, length in enumerate((4, 9, 6)):
        log.episodes(base_model, f"g{number}", [1.0, 0.0, 0.3], seed=number, length=length)
    twin = copy_of(log, tmp_path / "twin")
    launched = Launched(twin, tmp_path / "twin", way)
    try:
        assert Worker(log.database, log.artifacts, trainer_settings).visit(log.policy) is (
            Visit.STEPPED
        )
        launched.wait(lambda: twin.policy.head == 1, "no step was taken")
        code = launched.interrupt()
        said = launched.log.read_text()
        assert code in (0, 1, 130, -signal.SIGINT), said
        until = time.monotonic() + 30
        while launched.alive() and time.monotonic() < until:
            time.sleep(0.05)
        assert not launched.alive(), said
        # Only rank 0 works on the database.
        assert said.count("waiting for groups") == 1
    finally:
        launched.kill()
    alone, together = adapter(log), adapter(twin)
    assert alone.keys() == together.keys()
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) <= 1e-5
    assert any(float(w.abs().max()) > 1e-5 for name, w in alone.items() if "lora_B" in name)
    # What two took is taken again by one.
    again = replay.replay(twin.database, trainer_settings, 1, tmp_path / "again")
    assert (again.processes, again.agrees) == (2, True)
    mine, theirs = metrics(log), metrics(twin)
    assert (mine["passes"], theirs["passes"]) == (1, 3)
    assert ("sharded" in launched.log.read_text()) == (way != ["--multi_gpu"])
    for name in ("loss", "grad_norm", "ratio_mean", "tokens_trained"):
        assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name


def test_groups_are_dealt_out_evenly_and_whole():
    costs = [9, 7, 6, 5, 4, 1]
    owners = deal(costs, 2)
    hands = [sum(c for c, o in zip(costs, owners, strict=True) if o == hand) for hand in (0, 1)]
    assert sorted(hands) == [15, 17]
    assert deal([5], 3) == [0]
    assert deal([1, 1, 1], 3) == [0, 1, 2]
