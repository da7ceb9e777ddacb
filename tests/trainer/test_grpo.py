"""Advantages, and parity with TRL's own padded path."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gateway.store.policy_settings import Lora, PolicySettings
from tests.trainer import tiny
from trainer.arguments import TrainingSettingsError, check, grpo_config, scale_rewards
from trainer.grpo import StepTrainer, _no_reward, _no_tokens, _nothing
from trainer.logprobs import choose_way
from trainer.model import lora_config
from trainer.packing import pack
from trainer.without_vllm import GRPOTrainer


def step_trainer(folder: Path, **training):
    base = tiny.model()
    return StepTrainer(
        way=choose_way(base),
        model=base,
        args=grpo_config(PolicySettings(training=training), folder, "cpu"),
        peft_config=lora_config(Lora(rank=8), ""),
    )


def flat_group():
    """One group of one-turn samples, with logprobs near the model's own."""
    draw = np.random.default_rng(5)
    model, prompt = tiny.model(), tiny.ids(draw, 9)
    samples = []
    for number, worth in enumerate((1.2, -0.3, -0.9)):
        answer = tiny.ids(draw, 4 + number)
        made = tiny.sample(
            [("context", prompt), ("sampled", answer)], advantage=worth, name=f"t{number}"
        )
        noise = draw.normal(0, 0.3, len(answer))
        made.spans[0].logprobs[:] = (
            np.array(tiny.logprobs(model, prompt, answer)) + noise
        ).tolist()
        samples.append(made)
    return samples


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"beta": 0.05},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo", "max_completion_length": 64},
        {"entropy_coef": 0.01},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4},
        {"top_entropy_quantile": 0.5},
    ],
)
def test_loss_and_gradients_equal_those_of_trls_padded_path(tmp_path, training):
    ours = step_trainer(tmp_path, **training)
    packed = pack(flat_group())
    theirs = GRPOTrainer(
        model=tiny.model(),
        reward_funcs=[_no_reward],
        train_dataset=_nothing(),
        processing_class=_no_tokens(),
        args=grpo_config(PolicySettings(training=training), tmp_path, "cpu"),
        peft_config=lora_config(Lora(rank=8), ""),
    )
    for trainer in (ours, theirs):
        torch.manual_seed(3)
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
    ours._packed = packed
    fields = ours._fields(packed, packed.trained)
    mine = ours._compute_loss(ours.model, fields)
    mine.backward()
    padded = {
        **fields,
        "prompt_ids": torch.tensor(
            [s.token_ids[: s.spans[0].start].tolist() for s in packed.samples]
        ),
        "completion_ids": torch.zeros(packed.mask.shape, dtype=torch.long),
        "completion_mask": packed.mask.long(),
        "advantages": packed.advantages[:, 0],
    }
    padded["prompt_mask"] = torch.ones_like(padded["prompt_ids"])
    for row, s in enumerate(packed.samples):
        answer = s.token_ids[s.spans[0].start :]
        padded["completion_ids"][row, : len(answer)] = torch.from_numpy(answer)
    reference = theirs._compute_loss(theirs.model, padded)
    reference.backward()
    assert mine.item() == pytest.approx(reference.item(), rel=1e-4, abs=1e-6)
    left, right = (
        torch.cat([p.grad.flatten() for p in t.model.parameters() if p.requires_grad])
        for t in (ours, theirs)
    )
    assert right.norm() > 1e-3
    assert (left - right).norm() <= 2e-4 * right.norm()


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_the_gradient_does_not_depend_on_how_a_step_is_cut_into_passes(tmp_path, loss):
    samples = tiny.forked_samples()
    gradients = []
    for cuts in ([samples], [samples[:1], samples[1:4], samples[4:]]):
        trainer = step_trainer(tmp_path, loss_type=loss)
        trainer.training_step(trainer.model, [pack(cut) for cut in cuts])
        gradients.append(
            torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])
        )
    assert (gradients[0] - gradients[1]).norm() <= 1e-4 * gradients[0].norm()


def test_a_step_raises_the_rewarded_answer_and_lowers_the_other(tmp_path):
    trainer = step_trainer(tmp_path, learning_rate=3e-3)
    samples = flat_group()
    packed = pack(samples)
    for _ in range(4):
        trainer.train_on([packed])
    model = trainer.model.get_base_model()

    def total(sample):
        ids, start = sample.token_ids.tolist(), sample.spans[0].start
        return sum(tiny.logprobs(model.eval(), ids[:start], ids[start:]))

    before, after = tiny.model(), [total(s) for s in samples]
    moved = [
        now - sum(tiny.logprobs(before, s.token_ids.tolist()[:9], s.token_ids.tolist()[9:]))
        for now, s in zip(after, samples, strict=True)
    ]
    assert moved[0] > 0.05
    assert moved[2] < -0.05


def test_one_call_is_one_optimiser_step_and_its_metrics_are_whole(tmp_path):
    trainer = step_trainer(tmp_path, learning_rate=1e-3)
    for count in (1, 2):
        metrics = trainer.train_on([pack(flat_group())])
        state = trainer.optimizer.state_dict()["state"]
        assert {int(entry["step"]) for entry in state.values()} == {count}
        assert metrics["learning_rate"] == 1e-3
        assert {"loss", "grad_norm", "ratio_mean", "kl_sampling", "clip_ratio", "entropy"} <= set(
            metrics
        )


def test_what_was_logged_by_the_model_itself_has_a_ratio_of_1(tmp_path):
    samples, model = tiny.forked_samples(), tiny.model()
    for s in samples:
        for span in s.spans:
            ids = s.token_ids.tolist()
            span.logprobs[:] = tiny.logprobs(
                model, ids[: span.start], ids[span.start : span.stop], span.temperature
            )
    metrics = step_trainer(tmp_path).train_on([pack(samples)])
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl_sampling_abs"] < 1e-4
    assert metrics["clip_ratio"] == 0.0


def test_warming_up_goes_on_from_step_to_step(tmp_path):
    trainer = step_trainer(
        tmp_path, learning_rate=1e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=4
    )
    rates = [trainer.train_on([pack(flat_group())])["learning_rate"] for _ in range(3)]
    assert rates[0] < rates[1] < rates[2] <= 1e-3


def test_an_unknown_training_setting_is_refused_with_the_nearest_known_one():
    with pytest.raises(TrainingSettingsError, match=r"training\.learning_rate\?"):
        check({"learning_rat": 1e-4})


def test_a_setting_that_strop_decides_is_refused():
    with pytest.raises(
        TrainingSettingsError, match="num_generations is a setting of TRL that strop"
    ):
        check({"num_generations": 8})


def test_a_schedule_with_an_end_is_refused():
    with pytest.raises(TrainingSettingsError, match="constant_with_warmup"):
        check({"lr_scheduler_type": "linear"})


def test_a_wrong_value_is_refused_in_words(tmp_path):
    with pytest.raises(TrainingSettingsError, match="training settings are wrong"):
        grpo_config(PolicySettings(training={"optim": "nonsense"}), tmp_path, "cpu")


def test_old_names_of_scale_rewards_are_understood():
    assert scale_rewards(PolicySettings(training={"scale_rewards": False})) == "none"
    assert scale_rewards(PolicySettings()) == "group"
