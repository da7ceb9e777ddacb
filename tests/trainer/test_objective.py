"""Importance weights, rows and passes of the loss, computed by hand."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sqlalchemy import update

from gateway.store.models import Policy
from gateway.store.policy_settings import PolicySettings
from tests.trainer import tiny
from tests.trainer.test_grpo import step_trainer
from trainer.grpo import StepTrainer
from trainer.objective import effective_share, importance_weights
from trainer.packing import pack
from trainer.samples import Sample
from trainer.worker import Visit, Worker

LOSSES = ["bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo"]


def weights(mode, low=None, high=None):
    now, logged = torch.tensor([[0.5, -0.5, 9.0]]), torch.tensor([[0.0, 0.5, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    config = SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    return importance_weights(now, logged, mask, config)[0, :2].tolist()


def test_weights_of_tokens_are_truncated_or_masked():
    up, down = np.exp(0.5), np.exp(-1.0)
    assert weights("token_truncate") == pytest.approx([up, down])
    assert weights("token_truncate", high=1.5) == pytest.approx([1.5, down])
    assert weights("token_truncate", low=0.5, high=1.5) == pytest.approx([1.5, 0.5])
    assert weights("token_mask", high=1.5) == pytest.approx([0.0, down])
    assert weights("token_mask", low=0.5) == pytest.approx([up, 0.0])


def test_weights_of_sequences_are_the_product_over_their_tokens():
    assert weights("sequence_truncate") == pytest.approx([np.exp(-0.5)])
    assert weights("sequence_truncate", low=0.8) == pytest.approx([0.8])
    assert weights("sequence_mask", low=0.8) == pytest.approx([0.0])


def test_the_effective_sample_size_is_whole_for_equal_weights_and_one_for_a_single_one():
    assert effective_share(torch.full((5,), 0.3)) == pytest.approx(1.0)
    assert effective_share(torch.tensor([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    # (1 + 2 + 3)^2 / (3 * (1 + 4 + 9))
    assert effective_share(torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(36 / 42)
    assert effective_share(torch.zeros(3)) == 0.0


def near(samples: list[Sample]) -> list[Sample]:
    """Samples with logprobs near those of the tiny model."""
    model = tiny.model()
    for number, sample in enumerate(samples):
        ids = sample.token_ids.tolist()
        for span in sample.spans:
            now = tiny.logprobs(
                model, ids[: span.start], ids[span.start : span.stop], span.temperature
            )
            noise = np.random.default_rng(number).normal(0, 0.3, len(now))
            span.logprobs[:] = (np.array(now) + noise).tolist()
    return samples


def stirred(trainer: StepTrainer) -> StepTrainer:
    torch.manual_seed(3)
    for name, weight in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return trainer


def gradient(trainer: StepTrainer, cuts: list[list[Sample]]) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.training_step(trainer.model, [pack(cut) for cut in cuts])
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])


def episodes() -> list[Sample]:
    """Three trajectories; the first two of several threads."""
    samples = near(tiny.forked_samples()[:5])
    owners = ["one", "one", "two", "two", "three"]
    return [
        dataclasses.replace(sample, trajectory_id=owner)
        for sample, owner in zip(samples, owners, strict=True)
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_the_same_however_it_is_cut_into_passes(tmp_path, loss):
    # Passes hold whole trajectories, of different sizes.
    samples = episodes()
    trainer = stirred(
        step_trainer(tmp_path, loss_type=loss, beta=0.05, entropy_coef=0.01, scale_rewards="none")
    )
    whole = gradient(trainer, [samples])
    cut = gradient(trainer, [samples[:2], samples[2:4], samples[4:]])
    assert whole.norm() > 1e-3
    assert (whole - cut).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_trajectory_weighs_the_same_as_one_thread_or_as_several(tmp_path, loss):
    # Two turns, the second of which continues the first: one sequence, or two that share a turn.
    first, second, other = near(tiny.forked_samples()[2:5])
    joined = dataclasses.replace(first, trajectory_id="one")
    early, late = joined.spans
    threads = [
        Sample("one", "g", joined.token_ids[: early.stop], [early]),
        Sample("one", "g", joined.token_ids, [late]),
    ]
    rest = [
        dataclasses.replace(second, trajectory_id="two"),
        dataclasses.replace(other, trajectory_id="three"),
    ]
    trainer = stirred(
        step_trainer(tmp_path, loss_type=loss, beta=0.05, importance_sampling_level="sequence")
    )
    one = gradient(trainer, [[joined, *rest]])
    several = gradient(trainer, [[*threads, *rest]])
    assert (one - several).norm() <= 1e-4 * one.norm()


@pytest.mark.parametrize("loss", ["dapo", "grpo", "cispo", "sapo"])
def test_with_a_recomputed_old_policy_the_weights_multiply_the_advantages(tmp_path, loss):
    samples = episodes()
    trainer = stirred(step_trainer(tmp_path, loss_type=loss))
    trainer.recompute = True
    trainer.args.vllm_importance_sampling_clip_max = 1.1
    found = gradient(trainer, [samples])
    # By hand: the old policy is the present one, and each token's advantage is weighted.
    causal = trainer.model.get_base_model()
    plain = stirred(step_trainer(tmp_path, loss_type=loss))
    plain.recompute = True
    plain.args.vllm_importance_sampling_clip_max = None
    weighted = []
    for sample in samples:
        ids, spans = sample.token_ids.tolist(), []
        for span in sample.spans:
            now = tiny.logprobs(
                causal, ids[: span.start], ids[span.start : span.stop], span.temperature
            )
            for place, (new, old) in enumerate(zip(now, span.logprobs, strict=True)):
                at = span.start + place
                weight = min(float(np.exp(new - old)), 1.1)
                spans.append(
                    dataclasses.replace(
                        span,
                        start=at,
                        stop=at + 1,
                        logprobs=[new],
                        advantage=span.advantage * weight,
                    )
                )
        weighted.append(dataclasses.replace(sample, spans=spans))
    expected = gradient(plain, [weighted])
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def test_clipping_has_no_part_in_it_when_the_old_policy_is_recomputed(tmp_path):
    trainer = stirred(step_trainer(tmp_path, epsilon=1e-6, learning_rate=1e-5))
    trainer.recompute = True
    metrics = trainer.train_on([pack(episodes())])
    assert metrics["clip_ratio"] == 0.0
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-3)
    assert metrics["weight_mean"] > 0


def test_the_kl_term_keeps_near_the_version_that_it_is_told(tmp_path):
    trainer = stirred(step_trainer(tmp_path, beta=1.0, learning_rate=1e-9))
    from peft import get_peft_model_state_dict

    held = {name: w.clone() for name, w in get_peft_model_state_dict(trainer.model).items()}
    samples = episodes()
    from_base = trainer.train_on([pack(samples)])["kl_base"]
    assert from_base > 1e-4
    trainer.reference = held
    assert trainer.train_on([pack(samples)])["kl_base"] == pytest.approx(0.0, abs=1e-6)
    now = get_peft_model_state_dict(trainer.model)
    assert all(torch.allclose(now[name], held[name], atol=1e-6) for name in held)


def test_each_answer_has_the_mean_ratio_of_its_tokens(tmp_path):
    trainer = step_trainer(tmp_path, learning_rate=1e-9)
    samples = episodes()
    trainer.train_on([pack(samples[:2]), pack(samples[2:])])
    model = tiny.model()
    for sample in samples:
        ids = sample.token_ids.tolist()
        for span in sample.spans:
            now = tiny.logprobs(
                model, ids[: span.start], ids[span.start : span.stop], span.temperature
            )
            expected = np.exp(np.array(now) - np.array(span.logprobs)).mean()
            assert trainer.ratios[span.key] == pytest.approx(expected, rel=1e-3)


def test_the_metrics_of_a_step_are_those_of_its_tokens(tmp_path):
    samples = episodes()
    metrics = step_trainer(tmp_path, learning_rate=1e-9).train_on([pack(samples)])
    model = tiny.model()
    ratios = []
    for sample in samples:
        ids = sample.token_ids.tolist()
        for span in sample.spans:
            now = tiny.logprobs(
                model, ids[: span.start], ids[span.start : span.stop], span.temperature
            )
            ratios.extend(np.exp(np.array(now) - np.array(span.logprobs)))
    assert metrics["ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-3)
    assert metrics["effective_sample"] == pytest.approx(
        np.sum(ratios) ** 2 / (len(ratios) * np.sum(np.square(ratios))), rel=1e-3
    )
    assert metrics["kl_sampling"] == pytest.approx(-np.mean(np.log(ratios)), abs=1e-4)
    assert metrics["entropy"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_typ": "dapo"}, "did you mean loss_type|loss_typ"),
        ({"groupsize": 4}, "did you mean group_size"),
        ({"learning_rate": 1e-4}, r"training\.learning_rate"),
        ({"training": {"epsilon_hihg": 0.2}}, r"did you mean training\.epsilon_high"),
        ({"training": {"loss_type": "ppo"}}, r"training\.loss_type: .*dapo"),
        ({"training": {"num_generations": 8}}, "group_size"),
        ({"training": {"vllm_importance_sampling_mode": "token_mask"}}, "recomputed"),
        ({"kl_version": 3}, r"training\.beta"),
        (
            {
                "old_policy": "recomputed",
                "training": {
                    "loss_type": "vespo",
                    "vllm_importance_sampling_mode": "sequence_mask",
                },
            },
            "token_truncate",
        ),
    ],
)
def test_settings_that_would_do_nothing_or_are_unknown_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        PolicySettings(**settings)


def test_the_names_of_training_settings_are_those_of_trl():
    import inspect

    from gateway.store.training_settings import DECIDED, Training
    from trainer.without_vllm import GRPOConfig, GRPOTrainer

    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert set(Training.model_fields) <= theirs
    assert set(DECIDED) <= theirs
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for loss in LOSSES:
        assert f'"{loss}"' in source


def test_a_policy_keeps_near_the_version_of_its_settings(make_log, base_model, trainer_settings):
    log = make_log(training={"learning_rate": 1e-3, "beta": 0.1})
    worker = Worker(log.database, log.artifacts, trainer_settings)

    def step(number: int) -> float:
        log.episodes(base_model, f"g{number}", [1.0, 0.0], seed=number)
        assert worker.visit(log.policy) is Visit.STEPPED
        rows = log.rows("select metrics from steps where state = 'done' order by id desc limit 1")
        return json.loads(rows[0][0])["kl_base"]

    def near(version: int | None) -> None:
        with log.database.write() as connection:
            settings = {**log.policy.settings, "kl_version": version}
            connection.execute(update(Policy).values(settings=settings))

    assert step(1) == pytest.approx(0.0, abs=1e-7)
    # Before the second step the weights are those of version 1, and not those of the base.
    assert step(2) > 1e-7
    near(2)
    assert step(3) == pytest.approx(0.0, abs=1e-7)
    near(9)
    log.episodes(base_model, "g9", [1.0, 0.0], seed=9)
    assert worker.visit(log.policy) is Visit.FAILED
    (error,) = log.rows("select error from steps where state = 'failed'")
    assert "agent@9, its kl_version, which there is not" in error[0]
