"""Leases on policies, steps that are undone, files that stay."""

import json
import shutil
import subprocess
import threading
import time

import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import update

from gateway.store import claims, policies, policy_leases, training, trials
from gateway.store.fingerprint import base_digest
from gateway.store.life_settings import Keep
from gateway.store.models import Policy, Version
from gateway.store.policy_settings import Lora, PolicySettings
from trainer import failures, retention
from trainer.learner import Learner
from trainer.model import ModelError
from trainer.worker import Visit, Worker


@pytest.fixture
def make_worker(trainer_settings):
    def make(log, **options):
        return Worker(log.database, log.artifacts, trainer_settings, **options)

    return make


def train(log, worker, base_model, count, first=1):
    for number in range(first, first + count):
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
        assert worker.visit(log.policy) is Visit.STEPPED


def poison(monkeypatch):
    real = Learner.step

    def poisoned(self, *arguments):
        next(p for p in self.model.parameters() if p.requires_grad).data.fill_(float("nan"))
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", poisoned)


def set_policy(log, **values):
    with log.database.write() as connection:
        connection.execute(update(Policy).values(**values))


# Steps that are undone


def test_after_so_many_steps_that_are_not_finite_the_policy_is_paused_in_words(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log(pause_after=2)
    log.episodes(base_model, "g", [1.0, 0.0])
    worker = make_worker(log)
    with monkeypatch.context() as patch:
        poison(patch)
        for _ in range(2):
            worker._backoffs.clear()
            assert worker.visit(log.policy) is Visit.FAILED
    assert claims.trainable_policies(log.database) == []
    ((state, words),) = log.rows("select state, state_reason from policies")
    assert state == "paused"
    assert "2 steps in a row were undone" in words
    assert "not finite" in words
    kinds = [row[0] for row in log.rows("select kind from events order by id")]
    assert kinds == ["step_failed", "step_failed", "paused"]
    assert [row[0] for row in log.rows("select reason from steps")] == ["not_finite"] * 2
    # Nothing was published, and the group is marked and not lost.
    assert log.rows("select number from versions") == [(0,)]
    assert [tuple(row) for row in log.rows("select strikes, reason from groups")] == [
        (2, "not_finite")
    ]
    with log.database.write() as connection:
        assert trials.resumed(connection, "default", "agent", None)
    worker._backoffs.clear()
    assert worker.visit(log.policy) is Visit.STEPPED
    assert [tuple(row) for row in log.rows("select strikes, reason from groups")] == [(0, None)]


def test_a_step_that_succeeds_between_them_counts_anew(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log(pause_after=2)
    worker = make_worker(log)
    for number in (1, 2):
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
        with monkeypatch.context() as patch:
            poison(patch)
            assert worker.visit(log.policy) is Visit.FAILED
        worker._backoffs.clear()
        assert worker.visit(log.policy) is Visit.STEPPED
    assert log.policy.head == 2


def test_a_group_whose_step_was_undone_stands_behind_the_others(make_log, base_model):
    log = make_log()
    log.episodes(base_model, "bad", [1.0, 0.0])
    log.episodes(base_model, "good", [1.0, 0.0], seed=1)
    held = log.claim(limit=1)
    assert [group.id for group in held] == ["bad"]
    step = training.begin_step(log.database, log.policy, "w", {})
    training.fail_step(
        log.database, log.policy, step, "w", held, "nan", reason="not_finite", pause_after=9
    )
    assert [group.id for group in log.claim(limit=1)] == ["good"]


def test_a_full_disk_fails_the_step_in_words_and_loses_nothing(
    make_log, make_worker, base_model, tmp_path
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    log.artifacts.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(log.artifacts)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a full disk needs the right to mount one")
    try:
        worker = make_worker(log)
        assert worker.visit(log.policy) is Visit.FAILED
        ((error, reason),) = log.rows("select error, reason from steps")
        assert reason == "disk_full"
        assert "the disk is full; free space" in error
        assert log.states()["g-0"] == ("open", None)
        assert log.rows("select id from groups where lease_owner is not null") == []
        assert list((log.artifacts / "default" / "agent").iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=10m", str(log.artifacts)], check=True)
        worker._backoffs.clear()
        assert worker.visit(log.policy) is Visit.STEPPED
    finally:
        subprocess.run(["umount", str(log.artifacts)], check=True)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        Exception("(sqlite3.OperationalError) database or disk is full"),
    ],
)
def test_every_way_of_saying_that_the_disk_is_full_is_understood(error):
    assert failures.explain(error)[0] == failures.DISK_FULL


def test_a_base_model_whose_files_were_replaced_is_refused_in_words(
    make_log, make_worker, base_model, base, tmp_path
):
    folder = tmp_path / "changing"
    shutil.copytree(base, folder)
    log = make_log()
    set_policy(log, base_model=str(folder), base_digest=base_digest(folder))
    log.episodes(base_model, "g", [1.0, 0.0])
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    weights[name] = weights[name] + 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    worker = make_worker(log)
    assert worker.visit(log.policy) is Visit.FAILED
    ((error,),) = log.rows("select error from steps")
    assert "are not those that agent was trained on" in error
    shutil.copy(base / "model.safetensors", file)
    worker._backoffs.clear()
    assert worker.visit(log.policy) is Visit.STEPPED


def test_four_bits_and_bfloat16_are_refused_on_a_cpu_in_words(
    make_log, base_model, trainer_settings
):
    log = make_log()
    for change, words in (
        ({"quantization": "nf4"}, "STROP_TRAINER_QUANTIZATION is nf4, which needs a CUDA GPU"),
        ({"dtype": "bfloat16"}, "STROP_TRAINER_DTYPE is bfloat16, which needs a CUDA GPU"),
    ):
        with pytest.raises(ModelError, match=words):
            Learner(log.policy, trainer_settings.model_copy(update=change), log.artifacts)


def test_the_guards_factor_lowers_the_learning_rate(make_log, make_worker, base_model):
    log = make_log(training={"learning_rate": 1e-3})
    worker = make_worker(log)
    train(log, worker, base_model, 1)
    set_policy(log, rate_factor=0.5)
    train(log, worker, base_model, 1, first=2)
    rates = [json.loads(row[0])["learning_rate"] for row in log.rows("select metrics from steps")]
    assert rates == [1e-3, 5e-4]


# One trainer at a time, and all policies in turn


def test_two_trainers_on_one_policy_do_not_step_at_once(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    log.episodes(base_model, "h", [1.0, 0.0], seed=1)
    inside, leave = threading.Event(), threading.Event()
    real = Learner.step

    def slow(self, *arguments):
        inside.set()
        assert leave.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", slow)
    one, other = make_worker(log), make_worker(log)
    thread = threading.Thread(target=one.visit, args=(log.policy,))
    thread.start()
    assert inside.wait(30)
    before = log.policy
    assert before.held_by == one.name
    assert other.visit(before) is Visit.NOTHING
    # Even one that read the database a moment too early.
    before.held_by = None
    assert other.visit(before) is Visit.NOTHING
    leave.set()
    thread.join()
    assert other.visit(log.policy) is Visit.STEPPED
    made = [tuple(row) for row in log.rows("select state, parent_version, version from steps")]
    assert made == [("done", 0, 1), ("done", 1, 2)]


def test_a_policy_of_a_dead_trainer_is_taken_over_when_its_lease_runs_out(
    make_log, make_worker, base_model
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    assert policy_leases.hold(log.database, log.policy, "dead", 60)
    worker = make_worker(log)
    assert worker.visit(log.policy) is Visit.NOTHING
    set_policy(log, lease_expires=time.time() - 1)
    assert worker.visit(log.policy) is Visit.STEPPED


def test_a_trainer_that_was_taken_for_dead_does_not_publish(
    make_log, make_worker, base_model, monkeypatch
):
    log = make_log()
    log.episodes(base_model, "g", [1.0, 0.0])
    real = Learner.step

    def slow(self, *arguments):
        set_policy(log, lease_owner="other", lease_expires=time.time() + 60)
        return real(self, *arguments)

    monkeypatch.setattr(Learner, "step", slow)
    assert make_worker(log).visit(log.policy) is Visit.NOTHING
    ((state, error),) = log.rows("select state, error from steps")
    assert state == "superseded"
    assert "taken over by another trainer" in error
    assert log.policy.head == 0
    assert log.policy.held_by == "other"


def test_one_trainer_serves_several_policies_in_turn(make_log, make_worker, base_model, base):
    log = make_log()
    with log.database.write() as connection:
        policies.create(
            connection,
            "default",
            "second",
            base_model=str(base),
            base_served="base",
            lora=Lora(rank=8),
            settings=PolicySettings(group_size=2, groups_per_step=1, settle_seconds=0),
            adapter_path=None,
        )
    for number in range(3):
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
        log.episodes(base_model, f"s{number}", [1.0, 0.0], seed=number, policy="second")
    worker = make_worker(log, until_version=3)
    assert worker.run()
    order = [row[0] for row in log.rows("select policy from steps order by id")]
    assert order == ["agent", "second"] * 3


# Files that stay


def rewards_of(**means):
    from gateway.store.statistics import VersionReward

    return [VersionReward(int(n[1:]), "eval", 8, mean, 0.1) for n, mean in means.items()]


def test_kept_are_the_newest_the_best_and_every_mth():
    rows = [{"number": number} for number in range(30)]
    rewards = rewards_of(v3=0.9, v4=0.5, v17=0.8)
    stays = retention.kept(rows, rewards, Keep(newest=3, best=2, every=10))
    assert stays == {0, 3, 10, 17, 20, 27, 28, 29}
    assert retention.kept(rows, [], Keep(newest=1, best=2, every=0)) == {0, 29}


def test_files_of_versions_that_are_not_kept_are_deleted_after_a_step(
    make_log, make_worker, base_model
):
    log = make_log(keep={"newest": 1, "best": 0, "every": 0, "after_seconds": 0})
    worker = make_worker(log)
    train(log, worker, base_model, 3)
    # Nothing was taken out of service: nothing is deleted.
    folder = log.artifacts / "default" / "agent"
    assert len(list(folder.iterdir())) == 3
    with log.database.write() as connection:
        for number, state in ((1, "retired"), (2, "serving"), (3, "serving")):
            connection.execute(
                update(Version)
                .where(Version.number == number)
                .values(state=state, ended_at=time.time() if state == "retired" else None)
            )
    train(log, worker, base_model, 1, first=4)
    assert sorted(path.name for path in folder.iterdir()) == ["000002-2", "000003-3", "000004-4"]
    deleted = [row[0] for row in log.rows("select number from versions where deleted_at > 0")]
    assert deleted == [1]
