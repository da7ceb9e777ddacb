"""What a step reports, and where."""

import struct

import pytest

from gateway.store.policy_settings import PolicySettings
from trainer.reporting import Reporter, flat
from trainer.worker import Worker


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


def test_a_tracker_that_cannot_be_opened_costs_a_warning_and_nothing_else(
    make_log, tmp_path, monkeypatch, caplog
):
    import sys

    monkeypatch.setitem(sys.modules, "trackio", None)
    log = make_log()
    settings = PolicySettings(training={"report_to": ["none", "trackio"]})
    Reporter(tmp_path / "artifacts").report(log.policy, settings, 1, {"loss": 0.5})
    assert "pip install trackio" in caplog.text
