"""What a step reports, and where."""

import dataclasses
import struct
import sys
from types import SimpleNamespace

import pytest

from gateway.store.policy_settings import PolicySettings
from trainer.reporting import Reporter, flat
from trainer.worker import Worker

PACKAGES = {"tensorboard": "tensorboardX"}


def scalars(folder):
    """Names, steps and values in TensorBoard's files."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in folder.rglob("events.out.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack("<Q", data[at : at + 8])
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def test_the_numbers_of_a_step_reach_tensorboard_under_its_version(
    make_log, base_model, trainer_settings
):
    log = make_log(training={"report_to": "tensorboard", "run_name": "mine"})
    log.episodes(base_model, "g", [1.0, 0.0])
    log.reward(0.5, trajectory_id="g-0", name="style")
    assert Worker(log.database, log.artifacts, trainer_settings).run(once=True)
    (metrics,) = log.rows("select metrics from steps where state = 'done'")
    import json

    stored = json.loads(metrics[0]) if isinstance(metrics[0], str) else metrics[0]
    found = scalars(log.artifacts.parent / "runs" / "mine")
    for name, value in flat(stored).items():
        assert found[name, 1] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert {"rewards/reward", "rewards/style", "seconds_by_phase/train"} <= {n for n, _ in found}
    for name in (
        "advantage_std",
        "groups_taught_nothing",
        "ratio_mean",
        "clip_ratio",
        "effective_sample",
        "staleness_mean",
        "kl_sampling",
        "entropy",
        "grad_norm",
        "tokens_seen",
        "tokens_trained",
    ):
        assert (name, 1) in found


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_cannot_be_opened_costs_a_warning_and_nothing_else(
    name, make_log, tmp_path, monkeypatch, caplog
):
    for package in (name, "tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    log = make_log()
    settings = PolicySettings(training={"report_to": ["none", name]})
    Reporter(tmp_path / "artifacts").report(log.policy, settings, 1, {"loss": 0.5})
    assert f"pip install {PACKAGES.get(name, name)}" in caplog.text


class Run:
    def __init__(self, project: str):
        self.project = project
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, values, step, **_):
        self.logged.append((step, values))

    def finish(self):
        pass


def test_each_policy_of_a_process_has_a_run_of_its_own_in_wandb(make_log, tmp_path, monkeypatch):
    runs: list[Run] = []

    def init(project, reinit="default", **_):
        # What W&B does: one run of a process unless it is told otherwise.
        if not runs or reinit != "create_new":
            runs[:] = runs or [Run(project)]
            return runs[0]
        runs.append(Run(project))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    policy = make_log().policy
    settings = PolicySettings(training={"report_to": "wandb"})
    reporter = Reporter(tmp_path / "artifacts")
    for version in (1, 2):
        for name in ("one", "two"):
            of = dataclasses.replace(policy, name=name)
            reporter.report(of, settings, version, {"loss": version})
    reporter.close()
    assert [run.project for run in runs] == ["default-one", "default-two"]
    assert [[step for step, _ in run.logged] for run in runs] == [[1, 2], [1, 2]]
