"""Trainers are killed at random moments, again and again, and nothing comes of it."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest

from gateway.store import policies
from gateway.store.policy_settings import Lora, PolicySettings
from tests.trainer import killed, tiny
from trainer import checkpoints

KILLS = int(os.environ.get("STROP_TEST_KILLS", "50"))
STEPS = max(4, 2 * KILLS // 5)
"""Of each policy: more than are taken while trainers are being killed."""
LEASE = 0.3
POLICIES = ("agent", "second")
SETTINGS = {
    "group_size": 2,
    "groups_per_step": 2,
    "settle_seconds": 0,
    # All were sampled by version 0.
    "max_staleness": 10_000,
    "min_effective_sample": 0.0,
    "training": {"learning_rate": 1e-2},
}


@pytest.fixture(scope="module")
def context():
    """Forks processes that have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.killed"])
    first = context.Process(target=killed.nothing)
    first.start()
    first.join()
    return context


@pytest.fixture
def logs(tmp_path, base, base_model, monkeypatch):
    """The same log twice, with groups for all steps of two policies."""
    monkeypatch.setenv("STROP_CONFIG", str(tmp_path / "none.toml"))
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    found = []
    for folder in folders:
        folder.mkdir()
        log = tiny.Log(folder, base, **SETTINGS)
        with log.database.write() as connection:
            policies.create(
                connection,
                "default",
                "second",
                base_model=str(base),
                base_served="base",
                lora=Lora(rank=8),
                settings=PolicySettings(**SETTINGS),
                adapter_path=None,
            )
        found.append(log)
        with log.at_once():
            for number in range(2 * STEPS):
                for offset, policy in enumerate(POLICIES):
                    seed = 2 * number + offset
                    group = f"{policy}-{number:03d}"
                    log.episodes(base_model, group, [1.0, seed % 3 / 4], seed=seed, policy=policy)
    return found


def start(context, log):
    arguments = (log.url, str(log.artifacts), STEPS, LEASE)
    process = context.Process(target=killed.train, args=arguments)
    process.start()
    return process


def finished(process) -> None:
    process.join(240)
    assert process.exitcode == 0


def begun_and_done(log) -> tuple[int, int]:
    states = [row[0] for row in log.rows("select state from steps")]
    return len(states), states.count("done")


def done(log) -> list[tuple]:
    query = "select policy, parent_version, version from steps where state = 'done' order by id"
    return [tuple(row) for row in log.rows(query)]


@pytest.mark.timeout(600)
def test_trainers_killed_at_random_moments_end_where_an_undisturbed_one_does(context, logs):
    undisturbed, log = logs
    began = time.time()
    finished(start(context, undisturbed))
    ((first,),) = undisturbed.rows("select min(finished_at) from steps")
    dice = random.Random()
    # From a trainer's first moment to about the end of its first step, whatever else runs here.
    longest, kills = LEASE + first - began, 0
    for _ in range(KILLS):
        begun, taken = begun_and_done(log)
        process = start(context, log)
        process.join(dice.uniform(0.0, longest))
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
        now = begun_and_done(log)
        longest *= 1.4 if now[0] == begun else 1.15 if now[1] == taken else 0.7 ** (now[1] - taken)
    reached = begun_and_done(log)[1]
    finished(start(context, log))

    # Kills hit steps, and steps were taken between them.
    assert kills >= KILLS // 2
    assert reached > 0
    states = [row[0] for row in log.rows("select state from steps")]
    assert states.count("failed") >= KILLS // 10
    assert "running" not in states
    # Every version once, each from the one before.
    for policy in POLICIES:
        chain = [row[1:] for row in done(log) if row[0] == policy]
        assert chain == [(number, number + 1) for number in range(STEPS)]
    # No group lost, none used twice.
    uses = log.rows(
        "select completion_id, count(*) from completion_uses where reason is null "
        "group by completion_id"
    )
    assert len(uses) == 2 * 2 * STEPS * 2
    assert {row[1] for row in uses} == {1}
    assert set(log.states().values()) == {("used", None)}
    assert log.rows("select id from groups where lease_owner is not null") == []
    assert log.rows("select name from policies where lease_owner is not null") == []
    # Every adapter, the optimiser behind it, and so the last one too, bit for bit.
    for policy in POLICIES:
        for number in range(1, STEPS + 1):
            ours, theirs = (folder_of(each, policy, number) for each in (log, undisturbed))
            for name in ("adapter_model.safetensors", "state/training.pt"):
                assert (ours / name).read_bytes() == (theirs / name).read_bytes()
            record = checkpoints.load_record(ours)
            assert record.optimizer_steps == number
            assert record.groups == checkpoints.load_record(theirs).groups
            config = log.rows(f"select config from steps where id = {record.step_id}")
            assert [s["trajectory"] for s in json.loads(config[0][0])["samples"]]


def test_what_was_written_and_never_recorded_is_deleted_by_the_next_step(
    context, tmp_path, base, base_model, monkeypatch
):
    monkeypatch.setenv("STROP_CONFIG", str(tmp_path / "none.toml"))
    log = tiny.Log(tmp_path, base, **SETTINGS)
    with log.at_once():
        for number in range(2):
            log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
    arguments = (log.url, str(log.artifacts), LEASE)
    process = context.Process(target=killed.train_until_written, args=arguments)
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    folder = log.artifacts / "default" / "agent"
    assert [path.name for path in folder.iterdir()] == ["000001-1"]
    # Of a step of another database, and one that is not strop's: nobody's business here.
    other = folder / "000009-1"
    shutil.copytree(folder / "000001-1", other)
    record = json.loads((other / "state" / "step.json").read_text())
    record["completions"] = ["chatcmpl-elsewhere"]
    (other / "state" / "step.json").write_text(json.dumps(record))
    (folder / "000001-mine").mkdir()

    process = context.Process(target=killed.train, args=(log.url, str(log.artifacts), 1, LEASE))
    process.start()
    finished(process)
    assert log.rows("select id, state from steps") == [(1, "failed"), (2, "done")]
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["000001-2", "000001-mine", "000009-1"]


def folder_of(log, policy, number):
    ((path,),) = log.rows(
        f"select adapter_path from versions where policy = '{policy}' and number = {number}"
    )
    return checkpoints.Path(path)
