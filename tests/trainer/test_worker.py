"""The loop, end to end on a real database."""

import json
import threading
from pathlib import Path

import pytest
import torch
from sqlalchemy import update

from gateway.store import claims
from gateway.store.claims import ClaimedGroup
from gateway.store.models import Policy
from tests.trainer import tiny
from trainer import checkpoints
from trainer import worker as worker_module
from trainer.grpo import Stopped
from trainer.learner import Learner
from trainer.worker import Visit, Worker


@pytest.fixture
def make_worker(trainer_settings):
    def make(log, **options):
        return Worker(log.database, log.artifacts, trainer_settings, **options)

    return make


def steps(log):
    rows = log.rows("select state, parent_version, version, error from steps order by id")
    return [tuple(row) for row in rows]


def held(log):
    return [row[0] for row in log.rows("select id from groups where lease_owner is not null")]


def test_a_ready_group_becomes_a_step_and_a_version(make_log, make_worker, base_model):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0, None])
    assert make_worker(log).run(once=True)
    assert steps(log) == [("done", 0, 1, None)]
    assert log.policy.head == 1
    assert log.states() == {"g-0": ("used", None), "g-1": ("used", None), "g-2": ("open", None)}
    ((state, parent, path, probe),) = log.rows(
        "select state, parent, adapter_path, probe from versions where number = 1"
    )
    assert (state, parent) == ("ready", 0)
    assert Path(path) == log.artifacts / "default" / "agent" / "000001-1"
    probe = json.loads(probe)
    assert len(probe["logprobs"]) == len(probe["previous_logprobs"]) == len(probe["token_ids"]) - 1
    assert probe["logprobs"] != probe["previous_logprobs"]
    assert held(log) == []


def test_the_probe_tells_the_version_from_its_parent(make_log, make_worker, base_model):
    log = make_log(training={"learning_rate": 1e-2})
    log.episodes(base_model, "g", [1.0, 0.0])
    make_worker(log).run(once=True)
    ((probe,),) = log.rows("select probe from versions where number = 1")
    probe = json.loads(probe)
    ids = probe["token_ids"]
    assert probe["previous_logprobs"] == pytest.approx(
        tiny.logprobs(base_model, ids[:1], ids[1:]), abs=1e-4
    )
    moved = torch.tensor(probe["logprobs"]) - torch.tensor(probe["previous_logprobs"])
    assert moved.abs().mean() > 1e-3


def test_a_step_records_what_it_consumed_and_measured(make_log, make_worker, base_model):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    make_worker(log).run(once=True)
    ((metrics,),) = log.rows("select metrics from steps")
    metrics = json.loads(metrics)
    assert metrics["reward_mean"] == 0.5
    assert metrics["tokens_trained"] == 8
    assert metrics["tokens_seen"] == 12 + 8
    assert metrics["kl_sampling_abs"] < 1e-4
    assert {"pack", "train", "probe_before", "probe", "save", "total"} <= set(
        metrics["seconds_by_phase"]
    )
    uses = log.rows("select step_id, tokens, reason, reward from completion_uses order by row")
    assert [tuple(u) for u in uses] == [(1, 4, None, 1.0), (1, 4, None, 0.0)]
    record = checkpoints.load_record(log.artifacts / "default" / "agent" / "000001-1")
    assert record.completions == ["c1", "c2"]


def test_the_next_step_goes_on_from_the_last(make_log, make_worker, base_model):
    log = make_log()
    worker = make_worker(log)
    for number in (1, 2, 3):
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
        worker.run(once=True)
    assert [step[:3] for step in steps(log)] == [("done", 0, 1), ("done", 1, 2), ("done", 2, 3)]
    record = checkpoints.load_record(log.artifacts / "default" / "agent" / "000003-3")
    assert record.optimizer_steps == 3


def test_a_new_worker_makes_the_versions_that_the_old_one_would_have_made(
    make_log, make_worker, base_model, tmp_path, base
):
    made = []
    for restart in (False, True):
        folder = tmp_path / str(restart)
        folder.mkdir()
        log = tiny.Log(folder, base)
        worker = make_worker(log)
        for number in (1, 2):
            log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
            worker.run(once=True)
            worker = make_worker(log) if restart else worker
        file = log.artifacts / "default" / "agent" / "000002-2" / "adapter_model.safetensors"
        made.append(file.read_bytes())
    assert made[0] == made[1]


def test_nothing_is_done_while_too_few_groups_are_ready(make_log, make_worker, base_model):
    log = make_log(groups_per_step=2)
    log.episodes(base_model, "g", [1.0, 0.0])
    worker = make_worker(log)
    assert worker.visit(log.policy) is Visit.NOTHING
    assert steps(log) == []
    assert held(log) == []
    log.episodes(base_model, "h", [1.0, 0.0], seed=1)
    assert worker.visit(log.policy) is Visit.STEPPED


def test_a_closed_group_does_not_wait_for_others(make_log, make_worker, base_model):
    log = make_log(groups_per_step=3)
    log.episodes(base_model, "g", [1.0, 0.0, None])
    log.close_group("g")
    make_worker(log).run(once=True)
    assert log.policy.head == 1
    assert log.states()["g-2"] == ("skipped", "no_reward")


def test_a_closed_group_with_nothing_to_teach_does_not_start_a_step(
    make_log, make_worker, base_model
):
    log = make_log(groups_per_step=3)
    log.episodes(base_model, "g", [1.0, 0.0])
    log.episodes(base_model, "h", [None, None], seed=1)
    log.close_group("h")
    assert make_worker(log).visit(log.policy) is Visit.SKIPPED
    assert log.states()["h-0"] == ("skipped", "no_reward")
    assert log.states()["g-0"] == ("open", None)
    assert held(log) == []


def test_equal_rewards_make_no_step_and_no_version(make_log, make_worker, base_model):
    log = make_log()
    log.episodes(base_model, "g", [0.5, 0.5])
    assert make_worker(log).run(once=True)
    assert steps(log) == []
    assert log.policy.head == 0
    assert set(log.states().values()) == {("skipped", "equal_rewards")}
    uses = log.rows("select step_id, reason from completion_uses")
    assert [tuple(u) for u in uses] == [(None, "equal_rewards")] * 2
    assert not log.artifacts.exists()


def test_a_group_that_teaches_nothing_is_recorded_with_the_step_beside_it(
    make_log, make_worker, base_model
):
    log = make_log(groups_per_step=2)
    log.episodes(base_model, "g", [1.0, 0.0])
    log.episodes(base_model, "h", [0.5, 0.5], seed=1)
    make_worker(log).run(once=True)
    assert log.policy.head == 1
    assert log.states()["h-0"] == ("skipped", "equal_rewards")
    ((metrics,),) = log.rows("select metrics from steps")
    assert json.loads(metrics)["groups_equal"] == 1


def test_a_rollback_during_a_step_supersedes_it(make_log, make_worker, base_model, monkeypatch):
    log = make_log()
    worker = make_worker(log)
    log.episodes(base_model, "a", [1.0, 0.0])
    worker.run(once=True)
    log.episodes(base_model, "g", [1.0, 0.0], seed=1)
    real = Learner.step

    def interrupted(self, *arguments):
        log.move_head(0)
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", interrupted)
    worker.run(once=True)
    assert [step[0] for step in steps(log)] == ["done", "superseded"]
    assert log.states()["g-0"] == ("open", None)
    assert held(log) == []
    assert [p.name for p in (log.artifacts / "default" / "agent").iterdir()] == ["000001-1"]

    monkeypatch.setattr(Learner, "step", real)
    worker.run(once=True)
    assert steps(log)[-1][:3] == ("done", 0, 2)


def test_after_a_rollback_training_goes_on_from_that_version(make_log, make_worker, base_model):
    log = make_log()
    worker = make_worker(log)
    for number in (1, 2):
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
        worker.run(once=True)
    log.move_head(1)
    log.episodes(base_model, "g3", [1.0, 0.0], seed=3)
    worker.run(once=True)
    assert steps(log)[-1][:3] == ("done", 1, 3)
    record = checkpoints.load_record(log.artifacts / "default" / "agent" / "000003-3")
    assert (record.parent, record.optimizer_steps) == (1, 2)


def test_a_step_that_is_not_finite_fails_and_leaves_everything_as_it_was(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    real = Learner.step

    def poisoned(self, *arguments):
        next(p for p in self.model.parameters() if p.requires_grad).data.fill_(float("nan"))
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", poisoned)
    worker = make_worker(log)
    assert not worker.run(once=True)
    (step,) = steps(log)
    assert step[0] == "failed"
    assert "not finite" in step[3]
    assert log.policy.head == 0
    assert log.states()["g-0"] == ("open", None)
    assert held(log) == []

    monkeypatch.setattr(Learner, "step", real)
    worker._backoffs.clear()
    assert worker.run(once=True)
    assert log.policy.head == 1


def test_running_out_of_memory_is_said_and_does_not_end_the_loop(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])

    def burst(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Learner, "step", burst)
    assert make_worker(log).visit(log.policy) is Visit.FAILED
    assert "STROP_TRAINER_TOKEN_BUDGET" in steps(log)[0][3]


def test_failures_in_a_row_are_retried_less_and_less_often(
    make_log, trainer_settings, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    worker = Worker(
        log.database, log.artifacts, trainer_settings.model_copy(update={"backoff_seconds": 100.0})
    )
    clock = [0.0]
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock[0])

    def fail(*_):
        raise RuntimeError("nothing but noise")

    monkeypatch.setattr(Learner, "step", fail)
    visits = []
    for now in (0, 50, 101, 250, 302, 600, 703):
        clock[0] = float(now)
        visits.append(worker.visit(log.policy) is Visit.FAILED)
    assert visits == [True, False, True, False, True, False, True]


def test_a_base_model_that_is_not_there_fails_the_step_in_words(
    make_log, make_worker, base_model, tmp_path
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    with log.database.write() as connection:
        connection.exec_driver_sql(f"update policies set base_model = '{tmp_path}/gone'")
    assert not make_worker(log).run(once=True)
    assert "is not a model folder" in steps(log)[0][3]


def test_an_unknown_training_setting_in_the_database_is_refused_in_words(
    make_log, make_worker, base_model, caplog
):
    log = make_log()
    with log.database.write() as connection:
        settings = {**log.policy.settings, "training": {"learning_rat": 1}}
        connection.execute(update(Policy).values(settings=settings))
    log.episodes(base_model, "g", [1.0, 0.0])
    assert not make_worker(log).run(once=True)
    assert "did you mean training.learning_rate" in caplog.text
    assert steps(log) == []


def test_groups_of_a_dead_trainer_are_taken_over_when_their_lease_runs_out(
    make_log, make_worker, base_model
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    assert len(log.claim("dead", lease=60)) == 1
    worker = make_worker(log)
    assert worker.visit(log.policy) is Visit.NOTHING
    with log.database.write() as connection:
        connection.exec_driver_sql("update groups set lease_expires = 1")
    assert worker.visit(log.policy) is Visit.STEPPED


def test_a_trainer_whose_lease_was_lost_does_not_publish(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    real = Learner.step

    def slow(self, *arguments):
        with log.database.write() as connection:
            connection.exec_driver_sql("update groups set lease_owner = 'other'")
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", slow)
    assert make_worker(log).visit(log.policy) is Visit.NOTHING
    assert steps(log)[0][0] == "superseded"
    assert log.policy.head == 0


def test_leases_are_renewed_while_a_step_takes_longer_than_they_last(
    make_log, trainer_settings, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    settings = trainer_settings.model_copy(update={"lease_seconds": 0.3})
    renewed = threading.Event()
    real_renew, real_step = claims.renew_leases, Learner.step

    def renew(database, groups: list[ClaimedGroup], worker, seconds):
        held_now = real_renew(database, groups, worker, seconds)
        renewed.set()
        return held_now

    def slow(self, *arguments):
        assert renewed.wait(10)
        return real_step(self, *arguments)

    monkeypatch.setattr(claims, "renew_leases", renew)
    monkeypatch.setattr(Learner, "step", slow)
    assert Worker(log.database, log.artifacts, settings).visit(log.policy) is Visit.STEPPED


def test_a_stop_between_two_passes_gives_the_step_and_its_groups_up(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    worker = make_worker(log)
    real = Learner.step

    def asked_to_stop(self, samples, should_stop):
        worker.stop()
        with pytest.raises(Stopped):
            real(self, samples, should_stop)
        raise Stopped("the trainer was asked to stop")

    monkeypatch.setattr(Learner, "step", asked_to_stop)
    assert worker.run()
    assert steps(log)[0][0] == "failed"
    assert held(log) == []
    assert log.policy.head == 0


def test_running_ends_when_the_version_asked_for_is_there(make_log, make_worker, base_model):
    log = make_log()
    for number in range(3):
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
    assert make_worker(log, until_version=2).run()
    assert log.policy.head == 2


def test_other_policies_are_left_alone_when_one_is_named(make_log, make_worker, base_model):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    assert make_worker(log, only="another").run(once=True)
    assert steps(log) == []
