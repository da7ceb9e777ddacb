"""Versions on disk."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from gateway.store.claims import TrainablePolicy
from gateway.store.policy_settings import Lora
from tests.trainer import tiny
from trainer import checkpoints
from trainer.checkpoints import StepRecord, policy_folder, version_folder
from trainer.learner import Learner
from trainer.model import ModelError, load_base_model


@pytest.fixture
def policy(base):
    def make(head=0, path=None, **training):
        return TrainablePolicy(
            project="default",
            name="agent",
            base_model=str(base),
            head=head,
            head_path=str(path) if path else None,
            lora=Lora(rank=8).model_dump(),
            settings={"training": {"learning_rate": 1e-2, **training}},
        )

    return make


RECORD = StepRecord(1, 0, 7, 1, ["g"], ["t"], ["c"])


def never():
    return False


def weights(learner):
    return checkpoints.get_peft_model_state_dict(learner.model)


def test_a_restart_takes_the_same_next_step_as_a_trainer_that_went_on(
    policy, trainer_settings, tmp_path
):
    folder = tmp_path / "000001-7"
    first, second = tiny.forked_samples(1), tiny.forked_samples(2)
    going = Learner(policy(), trainer_settings, tmp_path)
    going.step(first, never)
    going.save(folder, RECORD)
    expected = going.step(second, never)

    back = Learner(policy(1, folder), trainer_settings, tmp_path)
    found = back.step(second, never)
    assert found.metrics == expected.metrics
    assert found.probe == expected.probe
    assert tiny.same_weights(back.model, going.model)
    assert back.optimizer_steps == 2


def test_the_optimisers_moments_are_what_makes_the_difference(policy, trainer_settings, tmp_path):
    folder = tmp_path / "000001-7"
    going = Learner(policy(), trainer_settings, tmp_path)
    going.step(tiny.forked_samples(1), never)
    going.save(folder, RECORD)
    going.step(tiny.forked_samples(2), never)
    (folder / "state" / "training.pt").unlink()
    back = Learner(policy(1, folder), trainer_settings, tmp_path)
    back.step(tiny.forked_samples(2), never)
    assert not tiny.same_weights(back.model, going.model)


def test_a_changed_learning_rate_applies_after_a_restart(policy, trainer_settings, tmp_path):
    folder = tmp_path / "000001-7"
    going = Learner(policy(), trainer_settings, tmp_path)
    going.step(tiny.forked_samples(1), never)
    going.save(folder, RECORD)
    back = Learner(policy(1, folder, learning_rate=5e-4), trainer_settings, tmp_path)
    assert back.step(tiny.forked_samples(2), never).metrics["learning_rate"] == 5e-4


def test_every_trainer_begins_a_policy_with_the_same_random_factors(
    policy, trainer_settings, tmp_path
):
    torch.manual_seed(1)
    one = Learner(policy(), trainer_settings, tmp_path)
    torch.manual_seed(2)
    other = Learner(policy(), trainer_settings, tmp_path)
    assert tiny.same_weights(one.model, other.model)
    assert any(bool(w.any()) for w in weights(one).values())


def test_the_zero_adapter_of_version_0_is_replaced_by_a_fresh_one(
    policy, trainer_settings, tmp_path
):
    fresh = Learner(policy(), trainer_settings, tmp_path)
    folder = tmp_path / "zero"
    folder.mkdir()
    zeros = {name: torch.zeros_like(w) for name, w in weights(fresh).items()}
    save_file(zeros, folder / "adapter_model.safetensors")
    learner = Learner(policy(0, folder), trainer_settings, tmp_path)
    assert tiny.same_weights(learner.model, fresh.model)


def test_the_adapter_is_what_vllm_takes(policy, trainer_settings, tmp_path, base):
    learner = Learner(policy(), trainer_settings, tmp_path)
    learner.step(tiny.forked_samples(), never)
    folder = version_folder(tmp_path, "default", "agent", 1, 7)
    learner.save(folder, RECORD)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["bias"], config["peft_type"]) == (8, "none", "LORA")
    assert (folder / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    saved = load_file(folder / "adapter_model.safetensors")
    assert {w.dtype for w in saved.values()} == {torch.float32}
    assert not any("lm_head" in name or "embed" in name for name in saved)
    assert sorted(p.name for p in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "state",
    ]
    model = PeftModel.from_pretrained(load_base_model(str(base), trainer_settings), folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, learner.model.eval()(ids).logits)


def test_a_version_appears_whole_or_not_at_all(policy, trainer_settings, tmp_path, monkeypatch):
    learner = Learner(policy(), trainer_settings, tmp_path)
    folder = version_folder(tmp_path, "default", "agent", 1, 7)

    def die(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoints, "_sync", die)
    with pytest.raises(OSError, match="no space"):
        learner.save(folder, RECORD)
    assert list(folder.parent.iterdir()) == []


def test_what_a_killed_trainer_left_is_never_taken_for_a_version(
    policy, trainer_settings, tmp_path
):
    parent = policy_folder(tmp_path, "default", "agent")
    left = parent / ".partial-000001-6-1"
    left.mkdir(parents=True)
    learner = Learner(policy(), trainer_settings, tmp_path)
    monkey = checkpoints._ABANDONED_SECONDS
    try:
        checkpoints._ABANDONED_SECONDS = -1.0
        learner.save(version_folder(tmp_path, "default", "agent", 1, 7), RECORD)
    finally:
        checkpoints._ABANDONED_SECONDS = monkey
    assert [p.name for p in parent.iterdir()] == ["000001-7"]
    assert checkpoints.load_record(parent / "000001-7") == RECORD


@pytest.mark.parametrize("fault", ["missing", "broken", "shape", "nan"])
def test_an_adapter_that_cannot_be_right_is_refused_in_words(
    fault, policy, trainer_settings, tmp_path
):
    learner = Learner(policy(), trainer_settings, tmp_path)
    folder = tmp_path / "000001-7"
    learner.save(folder, RECORD)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    if fault == "missing":
        path.unlink()
    elif fault == "broken":
        path.write_bytes(b"not a tensor")
    else:
        tensors[name] = tensors[name][:-1] if fault == "shape" else tensors[name] * float("nan")
        save_file(tensors, path)
    with pytest.raises(ModelError, match=r"roll|stay the same"):
        Learner(policy(1, folder), trainer_settings, tmp_path)


@pytest.mark.parametrize("name", ["..", ".hidden", "a/../../b", "%2F", "ü"])
def test_names_from_clients_stay_inside_the_artifacts(name, tmp_path):
    folder = policy_folder(tmp_path, name, name)
    assert folder.resolve().parent.parent == tmp_path.resolve()
    assert not folder.name.startswith(".")


def test_a_base_model_that_is_no_folder_is_refused_in_words(trainer_settings, tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_base_model(str(tmp_path / "nowhere"), trainer_settings)
    with pytest.raises(ModelError, match="Download it"):
        load_base_model("nobody/nothing", trainer_settings)


def test_target_modules_that_the_model_lacks_are_refused_in_words(
    policy, trainer_settings, tmp_path
):
    wrong = policy()
    wrong.lora = {"rank": 8, "target_modules": ["query_key_value"]}
    with pytest.raises(ModelError, match="its linear layers are down_proj"):
        Learner(wrong, trainer_settings, tmp_path)
