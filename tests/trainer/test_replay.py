"""Steps that are taken again, from the log and the version that they began from."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gateway.cli import app
from tests.trainer import tiny
from tests.trainer.test_life import make_worker, train
from trainer import replay
from trainer.__main__ import main as trainer_main
from trainer.recipe import LogChanged, recipe_of, samples_from
from trainer.worker import Visit

__all__ = ["make_worker"]


def test_a_step_taken_again_gives_the_same_adapter_bit_for_bit(
    make_log, make_worker, base_model, trainer_settings, tmp_path
):
    log = make_log(groups_per_step=2, training={"learning_rate": 1e-2})
    worker = make_worker(log)
    for number in range(1, 4):
        log.episodes(base_model, f"a{number}", [1.0, 0.0, 0.5], seed=number)
        log.episodes(base_model, f"b{number}", [0.2, 0.0], seed=10 + number)
        worker.visit(log.policy)
    # What happened since does not matter: corrected rewards, a rollback, other settings.
    log.reward(0.0, trajectory_id="a2-0")
    log.move_head(1)
    torch.manual_seed(99)
    for step in (1, 2, 3):
        found = replay.replay(log.database, trainer_settings, step, tmp_path / "again")
        assert (found.equal, found.version, found.largest_difference) == (True, step, 0.0)
    # It would be noticed if it were not the same.
    file = log.artifacts / "default" / "agent" / "000002-2" / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "lora_B" in name)
    weights[name][0, 0] += 1e-7
    save_file(weights, file)
    found = replay.replay(log.database, trainer_settings, 2, tmp_path / "again")
    assert found.equal is False


def test_what_cannot_be_taken_again_is_refused_in_words(
    make_log, make_worker, base_model, trainer_settings, tmp_path
):
    log = make_log()
    worker = make_worker(log)
    train(log, worker, base_model, 2)

    def again(step):
        return replay.replay(log.database, trainer_settings, step, tmp_path / "again")

    with pytest.raises(replay.ReplayError, match="there is no step 7"):
        again(7)
    shutil.rmtree(log.artifacts / "default" / "agent" / "000001-1")
    with pytest.raises(replay.ReplayError, match=r"agent@1, from which step 2 began, are deleted"):
        again(2)
    with log.database.write() as connection:
        connection.exec_driver_sql("delete from trajectories where id = 'g1-0'")
    with pytest.raises(LogChanged, match="is deleted"):
        again(1)
    with log.database.write() as connection:
        connection.exec_driver_sql("update steps set version = null, state = 'failed' where id = 1")
    with pytest.raises(replay.ReplayError, match="step 1 is failed"):
        again(1)


def test_a_step_of_several_processes_is_compared_within_what_their_sums_may_differ(
    make_log, make_worker, base_model, trainer_settings, tmp_path, monkeypatch, capsys
):
    log = make_log()
    train(log, make_worker(log), base_model, 1)
    config = json.loads(log.rows("select config from steps")[0][0])
    assert config["processes"] == 1
    config["processes"] = 2
    with log.database.write() as connection:
        connection.exec_driver_sql("update steps set config = ?", (json.dumps(config),))
    file = log.artifacts / "default" / "agent" / "000001-1" / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if "lora_B" in name)
    monkeypatch.setattr(sys, "argv", ["trainer", "replay", "1"])
    monkeypatch.setenv("STROP_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("STROP_TRAINER_DEVICE", "cpu")
    for difference, code, words in ((5e-6, 0, ", as it may."), (5e-5, 1, "e-05.")):
        save_file({**weights, name: weights[name] + difference}, file)
        assert trainer_main() == code
        said = capsys.readouterr().out
        assert "2 processes took it then and one does now" in said
        assert said.rstrip().endswith(words)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="one process takes a step again"):
        trainer_main()


def test_a_recipe_gives_the_samples_back(make_log, base_model):
    log = make_log()
    prompt, answer, more = [3, 4, 5], [6, 7], [8, 9, 10]
    turns = [
        tiny.Turn(prompt, [answer], [[-0.1, -0.2]]),
        tiny.Turn([*prompt, *answer, 11], [more], [[-0.3, -0.4, -0.5]]),
    ]
    log.add("g", "t", turns, reward=1.0)
    log.add("g", "u", [tiny.Turn(prompt, [[12]], [[-0.7]])], reward=0.0)
    from trainer.plan import make_plan

    plan = make_plan(log.policy, log.claim(), log.settings, "group")
    recipe = json.loads(json.dumps(recipe_of(plan.samples)))
    found = samples_from(log.database, "default", recipe)
    assert [(s.trajectory_id, s.group_id, s.token_ids.tolist(), s.spans) for s in found] == [
        (s.trajectory_id, s.group_id, s.token_ids.tolist(), s.spans) for s in plan.samples
    ]


def test_a_step_with_a_sub_agent_is_taken_again_too(
    make_log, make_worker, trainer_settings, tmp_path
):
    log = make_log()
    for number, reward in enumerate((1.0, 0.0)):
        log.add("g", f"t{number}", [tiny.Turn([3, 4, 5], [[6, 7 + number]])], reward=reward)
        turn = tiny.Turn([13, 14], [[15, 16 + number]])
        log.add("sub", f"s{number}", [turn], parent=f"t{number}")
    assert make_worker(log).visit(log.policy) is Visit.STEPPED
    used = log.rows("select distinct trajectory_id from completion_uses where reason is null")
    assert {row[0] for row in used} == {"t0", "t1", "s0", "s1"}
    assert replay.replay(log.database, trainer_settings, 1, tmp_path / "again").equal


def test_the_command_takes_a_step_again(
    make_log, make_worker, base_model, tmp_path, monkeypatch, capsys
):
    log = make_log()
    train(log, make_worker(log), base_model, 1)
    called = []
    monkeypatch.setattr(
        "gateway.commands.step.subprocess.call", lambda command: called.append(command) or 0
    )
    assert CliRunner().invoke(app, ["step", "replay", "1", "--out", "x"]).exit_code == 0
    (command,) = called
    assert command == [sys.executable, "-m", "trainer", "replay", "1", "--out", "x"]
    monkeypatch.setattr(sys, "argv", ["trainer", "replay", "1"])
    monkeypatch.setenv("STROP_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("STROP_TRAINER_DEVICE", "cpu")
    assert trainer_main() == 0
    said = capsys.readouterr().out
    assert f"Step 1 taken again: {tmp_path / 'replays'}" in said
    assert "It is version 1, bit for bit." in said
    monkeypatch.setattr(sys, "argv", ["trainer", "replay", "1", "--json"])
    assert trainer_main() == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step_id"], answer["version"], answer["agrees"]) == (1, 1, True)
    assert answer["metrics"]["tokens_trained"] > 0
    monkeypatch.setattr(sys, "argv", ["trainer", "replay", "9"])
    assert trainer_main() == 1
    assert "there is no step 9" in capsys.readouterr().err
