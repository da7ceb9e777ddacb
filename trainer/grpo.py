"""GRPO over logged samples: advantages, and TRL's trainer with its data taken from the log.

Objective. For a group of episodes of one task with scores r_1 .. r_G, episode i has the advantage

    A_i = (r_i - mean(r)) / (std(r) + 1e-4)

(Shao et al. 2024, "DeepSeekMath"; std with G - 1 in the denominator, left out with
`scale_rewards = "none"`). The loss is minimised over all sampled tokens t of the step,

    L = -1/M  sum_t  min(w_t A_t, clip(w_t, 1 - eps, 1 + eps_high) A_t),   w_t = pi(t) / mu(t)

with M the number of sampled tokens in the whole step: the token-level normalisation of DAPO (Yu et
al. 2025), in which neither the length of an answer nor the way in which a step is cut into rows and
passes changes what a token counts for. mu is the distribution that the token was really sampled
from: the logged logprob, of the version that served it, temperature included; pi has the same
temperature. There is no second policy, no recomputed "old" logprob, and no correction for a
mismatch between server and trainer: the one ratio is all of these. KL and entropy terms are 0
unless a policy's `training` settings ask for them; the reference of the KL term is the base model.

One step of strop is one optimiser step. What GRPO leaves open (other losses, clipping, optimiser,
weight decay, ...) is TRL's, under TRL's names.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback

from trainer.logprobs import Way, trained_logprobs
from trainer.packing import PackedStep
from trainer.without_vllm import GRPOTrainer


class Stopped(Exception):
    """The step was abandoned because the process was asked to end."""


class StepTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer, one optimiser step at a time, over packed steps instead of generations.

    `train_on` may be called any number of times; model, optimiser and scheduler stay. What TRL
    computes is untouched: loss types, clipping, KL, gradient norm, metrics.
    """

    def __init__(self, way: Way, **arguments: Any):
        super().__init__(
            # Asked for by the constructor, and not used: rewards and data come from the log.
            reward_funcs=[_no_reward],
            train_dataset=_nothing(),
            processing_class=_no_tokens(),
            **arguments,
        )
        # Only the constructor needed it; later it would overwrite the model's special tokens.
        self.processing_class = None
        self.way = way
        self.create_optimizer()
        # No end is known, so schedules are those that need none; kept from one step to the next.
        self.create_scheduler(num_training_steps=1 << 40)
        self._created_lr_scheduler = False
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.should_stop: Callable[[], bool] = lambda: False
        self._optimising = False
        self.optimizer.register_step_pre_hook(self._begin_optimising)
        self._batches: list[PackedStep] = []
        self._packed: PackedStep | None = None
        self._seen: list[tuple[Tensor, Tensor]] = []

    def train_on(self, batches: Sequence[PackedStep]) -> dict[str, float]:
        """Take one optimiser step on the passes of a step; returns its metrics.

        Raises:
            Stopped: `should_stop` said so; the weights are untouched.
        """
        self._batches, self._seen = list(batches), []
        self._optimising = False
        try:
            self.train()
            logged = next(log for log in self.state.log_history if "grad_norm" in log)
            return self._measured(logged)
        finally:
            self._batches, self._seen, self._packed = [], [], None
            self._metrics["train"].clear()

    def _begin_optimising(self, *_: Any) -> None:
        self._optimising = True

    def drop_gradients(self, cause: str) -> None:
        """Forget a step that ended before the optimiser's part of it.

        Raises:
            RuntimeError: the optimiser had begun, and the weights may be half changed.
        """
        if self._optimising:
            raise RuntimeError(f"the optimiser did not finish: {cause}")
        self.model.zero_grad(set_to_none=True)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One item: the whole step."""
        return DataLoader(cast(Any, [self._batches]), batch_size=None, collate_fn=_same)

    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the estimate of transformers knows nothing of shared prefixes."""
        return 0

    def _send_telemetry(self) -> None:
        pass

    def training_step(
        self, model: nn.Module, inputs: list[PackedStep], num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward over every pass of the step; gradients add up."""
        # Losses that average within a pass are averaged over the passes with this.
        self.current_gradient_accumulation_steps = len(inputs)
        trained = sum(packed.trained for packed in inputs)
        loss = torch.zeros((), device=self.args.device)
        for packed in self.passes(inputs):
            if self.should_stop():
                raise Stopped("the trainer was asked to stop")
            self._packed = packed
            # TRL multiplies by the number of passes what it takes for the tokens of one of them.
            fields = self._fields(packed, trained / len(inputs))
            loss += super().training_step(model, fields, num_items_in_batch)
        return loss

    def passes(self, inputs: Sequence[PackedStep]) -> Sequence[PackedStep]:
        """Those of a step that this process does."""
        return inputs

    def _fields(self, packed: PackedStep, trained_per_pass: float) -> dict[str, Tensor]:
        """What `GRPOTrainer._compute_loss` reads, in the (B, T) layout of `packed`."""
        # Ids are not used: `_get_per_token_logps_and_entropies` below has the packed ones.
        ids = packed.mask.new_zeros(packed.mask.shape, dtype=torch.long)
        fields = {
            "prompt_ids": ids[:, :0],
            "prompt_mask": ids[:, :0],
            "completion_ids": ids,
            "completion_mask": packed.mask,
            "old_per_token_logps": packed.logprobs,
            "advantages": packed.advantages,
            "num_items_in_batch": packed.mask.new_tensor(trained_per_pass),
        }
        if self.beta != 0.0:
            with torch.no_grad(), self.model.disable_adapter():
                reference, _ = trained_logprobs(self._causal_model(), packed, self.way)
            fields["ref_per_token_logps"] = packed.spread(reference)
        return fields

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        assert self._packed is not None
        with self.accelerator.autocast():
            logprobs, entropies = trained_logprobs(
                self._causal_model(), self._packed, self.way, self._entropy_bonus_enabled
            )
        logged = self._packed.logprobs.view(-1)[self._packed.term_place]
        self._seen.append((logprobs.detach(), logged))
        return self._packed.spread(logprobs), self._packed.spread(entropies), None

    def _causal_model(self) -> nn.Module:
        return cast(nn.Module, self.accelerator.unwrap_model(self.model).get_base_model())

    def _measured(self, logged: dict[str, float]) -> dict[str, float]:
        now = torch.cat([logprobs for logprobs, _ in self._seen]).double()
        then = torch.cat([logprobs for _, logprobs in self._seen]).double()
        ratio = torch.exp(now - then)
        metrics = {
            "loss": logged["loss"],
            "grad_norm": logged["grad_norm"],
            "learning_rate": logged["learning_rate"],
            "ratio_mean": ratio.mean().item(),
            "ratio_max": ratio.max().item(),
            "kl_sampling": (then - now).mean().item(),
            "kl_sampling_abs": (then - now).abs().mean().item(),
        }
        renamed = {
            "entropy": "entropy",
            "kl": "kl_base",
            "clip_ratio/region_mean": "clip_ratio",
            "cispo_clip_ratio": "clip_ratio",
        }
        for theirs, ours in renamed.items():
            if logged.get(theirs) is not None:
                metrics[ours] = logged[theirs]
        return metrics


def all_finite(model: nn.Module, metrics: dict[str, float]) -> bool:
    """Whether a step's loss, gradient norm and all trained weights are finite."""
    numbers = all(math.isfinite(metrics[name]) for name in ("loss", "grad_norm"))
    return numbers and all(
        bool(torch.isfinite(weight).all()) for weight in model.parameters() if weight.requires_grad
    )


def _same(item: Any) -> Any:
    return item


def _no_reward(**_: Any) -> list[None]:
    return []


def _nothing() -> Any:
    from datasets import Dataset  # type: ignore[import-untyped]

    return Dataset.from_dict({"prompt": [""]})


def _no_tokens() -> Any:
    # Not even the base model's own: nothing is ever tokenised here.
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"-": 0}, unk_token="-"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="-", pad_token="-")
