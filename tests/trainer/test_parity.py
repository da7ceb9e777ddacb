"""Loss and gradients of packed steps equal those of TRL's own padded path, whatever is packed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gateway.store.policy_settings import Lora, PolicySettings
from tests.trainer import tiny
from trainer.arguments import grpo_config
from trainer.grpo import StepTrainer, _no_reward, _no_tokens, _nothing
from trainer.logprobs import choose_way
from trainer.lora_linear import speed_up
from trainer.model import lora_config
from trainer.packing import PackedStep, pack
from trainer.remade import remake
from trainer.without_vllm import GRPOTrainer

LOSSES = ["bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo"]
SPREAD = 0.15
"""Of the weights: larger ones make the rounding of float32 show in the steeper losses."""


def logged(samples):
    """Samples at temperature 1 with logprobs near those of the tiny model."""
    model = tiny.model(spread=SPREAD)
    for sample in samples:
        ids = sample.token_ids.tolist()
        for span in sample.spans:
            now = tiny.logprobs(model, ids[: span.start], ids[span.start : span.stop])
            noise = np.random.default_rng(len(ids)).normal(0, 0.3, len(now))
            span.logprobs[:] = (np.array(now) + noise).tolist()
            object.__setattr__(span, "temperature", 1.0)
    return samples


def flat() -> list[list[Any]]:
    draw = np.random.default_rng(1)
    prompt = tiny.ids(draw, 9)
    return [
        [
            tiny.sample([("context", prompt), ("sampled", tiny.ids(draw, 4 + i))], advantage=worth)
            for i, worth in enumerate((1.2, -0.3, -0.9))
        ]
    ]


def agents() -> list[list[Any]]:
    draw = np.random.default_rng(2)
    prompt = tiny.ids(draw, 9)
    samples = []
    for worth in (0.8, -0.1, -0.7):
        parts = [("context", prompt)]
        for turn in range(3):
            parts += [("sampled", tiny.ids(draw, 3 + turn)), ("context", tiny.ids(draw, 2))]
        samples.append(tiny.sample(parts[:-1], advantage=worth))
    return [samples]


def forks() -> list[list[Any]]:
    return [tiny.forked_samples()]


def split() -> list[list[Any]]:
    samples = tiny.forked_samples()
    return [[s for s in samples if s.group_id == group] for group in ("g", "h")]


SHAPES = {"flat": flat, "agents": agents, "forks": forks, "split": split}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def both(request, tmp_path_factory):
    """strop's trainer and TRL's over the same model with the same adapter."""
    folder = tmp_path_factory.mktemp("parity")
    arguments = {"peft_config": lora_config(Lora(rank=8), "")}

    def args():
        training = {"max_completion_length": 32}
        return grpo_config(PolicySettings(training=training), Path(folder), "cpu")

    base = tiny.model(request.param, spread=SPREAD)
    ours = StepTrainer(way=choose_way(base), model=base, args=args(), **arguments)
    theirs = GRPOTrainer(
        model=tiny.model(request.param, spread=SPREAD),
        reward_funcs=[_no_reward],
        train_dataset=_nothing(),
        processing_class=_no_tokens(),
        args=args(),
        **arguments,
    )
    for trainer in (ours, theirs):
        torch.manual_seed(3)
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
        trainer.model.train()
    assert speed_up(ours.model) == 14
    assert remake(ours.model) >= 7
    return ours, theirs


def padded(packed: PackedStep, tokens: float) -> dict[str, torch.Tensor]:
    """A pass as TRL lays it out: prompts padded on the left, the rest on the right."""
    samples = packed.samples
    firsts = [s.spans[0].start for s in samples]
    longest = max(firsts)
    prompts = [
        np.pad(s.token_ids[:f], (longest - f, 0)) for s, f in zip(samples, firsts, strict=True)
    ]
    shown = [np.arange(longest) >= longest - f for f in firsts]
    width = packed.mask.shape[1]
    rest = [s.token_ids[f:] for s, f in zip(samples, firsts, strict=True)]
    answers = [np.pad(ids, (0, width - len(ids))) for ids in rest]
    there = [np.arange(width) < len(ids) for ids in rest]
    return {
        "prompt_ids": torch.tensor(np.stack(prompts)),
        "prompt_mask": torch.tensor(np.stack(shown)).long(),
        "completion_ids": torch.tensor(np.stack(answers)),
        "completion_mask": torch.tensor(np.stack(there)).long(),
        "tool_mask": packed.mask.long(),
        "advantages": packed.advantages,
        "old_per_token_logps": packed.logprobs,
        "num_items_in_batch": torch.tensor(tokens),
    }


def gradient(trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_equals_trls_padded_one(both, loss, shape):
    ours, theirs = both
    passes = [pack(logged(samples)) for samples in SHAPES[shape]()]
    trained = sum(packed.trained for packed in passes)
    for trainer in both:
        trainer.loss_type = loss
        trainer.current_gradient_accumulation_steps = len(passes)
        trainer.model.zero_grad()
    losses = []
    for packed in passes:
        ours._packed = packed
        mine = ours._compute_loss(ours.model, ours._fields(packed, trained / len(passes)))
        mine.backward()
        reference = theirs._compute_loss(theirs.model, padded(packed, trained / len(passes)))
        reference.backward()
        losses.append((mine.item(), reference.item()))
    for found, wanted in losses:
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    found, wanted = gradient(ours), gradient(theirs)
    assert wanted.norm() > 1e-3
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()
