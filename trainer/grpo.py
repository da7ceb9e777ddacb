"""GRPO over logged samples: TRL's trainer with its data taken from the log.

The loss is minimised over all sampled tokens t of the step,

    L = -1/M  sum_t  min(w_t A_t, clip(w_t, 1 - eps, 1 + eps_high) A_t),   w_t = pi(t) / mu(t)

with A_t the advantage of the token's turn (see `trainer.credit`) and M the number of sampled tokens
in the whole step: the token-level normalisation of DAPO (Yu et al. 2025), in which neither the
length of an answer nor the way in which a step is cut into rows and passes changes what a token
counts for. mu is the distribution that the token was really sampled from: the logged logprob, of
the version that served it, temperature included; pi has the same temperature. By default there is
no second policy, no recomputed "old" logprob, and no correction for a mismatch between server and
trainer: the one ratio is all of these. `trainer.objective` has the other way. KL and entropy terms
are 0 unless a policy's `training` settings ask for them; the reference of the KL term is the base
model, or a version of the policy.

One step of strop is one optimiser step. What GRPO leaves open (other losses, clipping, optimiser,
weight decay, ...) is TRL's, under TRL's names. Whatever the loss, a row of it is a trajectory, and
passes add up to the same step however it is cut.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback

from trainer import metrics
from trainer.logprobs import Way, trained_logprobs
from trainer.objective import (
    Rows,
    by_answer,
    by_trajectory,
    effective_share,
    importance_weights,
    passes_for,
    rows_of,
    trained_by_trajectory,
)
from trainer.packing import PackedStep
from trainer.samples import ChoiceKey
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
        self.recompute = False
        """Whether the old policy is that of the step's start; else it is the logged one."""
        self.reference: dict[str, Tensor] | None = None
        """Adapter that the KL term keeps near; None is the base model."""
        self.ratios: dict[ChoiceKey, float] = {}
        """Of the last step: the mean importance weight of each answer's tokens."""
        self._batches: list[PackedStep] = []
        self._packed: PackedStep | None = None
        self._rows: Rows | None = None
        self._inputs: dict[str, Tensor] = {}
        self._seen: list[metrics.Seen] = []

    def train_on(self, batches: Sequence[PackedStep]) -> dict[str, float]:
        """Take one optimiser step on the passes of a step; returns its metrics.

        Raises:
            Stopped: `should_stop` said so; the weights are untouched.
        """
        self._batches, self._seen, self.ratios = list(batches), [], {}
        self._optimising = False
        try:
            self.train()
            logged = next(log for log in self.state.log_history if "grad_norm" in log)
            for seen in self._seen:
                self.ratios.update(seen.answers)
            return metrics.of_step(logged, self._seen)
        finally:
            self._batches, self._seen, self._packed, self._rows = [], [], None, None
            self._inputs = {}
            self._metrics["train"].clear()

    @torch.no_grad()
    def effective_shares(self, batches: Sequence[PackedStep]) -> dict[str, float]:
        """Effective sample size of each trajectory's tokens, as a share of them."""
        ratios: dict[str, list[Tensor]] = {}
        for packed in batches:
            now, _ = trained_logprobs(self._causal_model(), packed, self.way)
            logged = packed.logprobs.view(-1)[packed.term_place]
            found = by_trajectory(packed, torch.exp(now.double() - logged.double()))
            for name, part in found.items():
                ratios.setdefault(name, []).append(part)
        return {name: effective_share(torch.cat(parts)) for name, parts in ratios.items()}

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
        trained = trained_by_trajectory(inputs)
        tokens, coefficient = sum(trained.values()), float(self.args.entropy_coef)
        loss = torch.zeros((), device=self.args.device)
        for packed in self.passes(inputs):
            if self.should_stop():
                raise Stopped("the trainer was asked to stop")
            self._packed = packed
            self._rows = rows_of(packed, trained)
            passes = passes_for(self.loss_type, packed, self._rows.shape[0], len(trained), tokens)
            self.current_gradient_accumulation_steps = passes
            # The entropy term is a mean over the pass's tokens, divided by the number of passes.
            self.entropy_coef = coefficient * passes * packed.trained / tokens
            # TRL multiplies by the number of passes what it takes for the tokens of one of them.
            fields = self._by_rows(packed, self._fields(packed, tokens / passes))
            loss += super().training_step(model, fields, num_items_in_batch)
        self.entropy_coef = coefficient
        return loss

    def passes(self, inputs: Sequence[PackedStep]) -> Sequence[PackedStep]:
        """Those of a step that this process does."""
        return inputs

    def _by_rows(self, packed: PackedStep, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """The fields of a pass laid out by trajectory, (R, W)."""
        rows = self._rows
        assert rows is not None
        found = {
            name: rows.spread(value.reshape(-1)[packed.term_place])
            if value.shape == packed.mask.shape
            else value
            for name, value in fields.items()
        }
        empty = found["completion_mask"].new_zeros((rows.shape[0], 0), dtype=torch.long)
        found.update(prompt_ids=empty, prompt_mask=empty)
        if self.loss_type in ("grpo", "sapo"):
            # Their mean over a row is over the tokens that are in this pass.
            found["advantages"] = found["advantages"] * rows.share
        self._inputs = found
        return found

    def _fields(self, packed: PackedStep, trained_per_pass: float) -> dict[str, Tensor]:
        """What `GRPOTrainer._compute_loss` reads, in the (B, T) layout of `packed`."""
        # Ids are not used: `_get_per_token_logps_and_entropies` below has the packed ones.
        ids = packed.mask.new_zeros(packed.mask.shape, dtype=torch.long)
        fields = {
            "prompt_ids": ids[:, :0],
            "prompt_mask": ids[:, :0],
            "completion_ids": ids,
            "completion_mask": packed.mask,
            "sampling_per_token_logps": packed.logprobs,
            "advantages": packed.advantages,
            "num_items_in_batch": packed.mask.new_tensor(trained_per_pass),
        }
        if not self.recompute:
            # Without it TRL takes the policy of this forward pass.
            fields["old_per_token_logps"] = packed.logprobs
        if self.beta != 0.0:
            with torch.no_grad(), self._as_reference():
                reference, _ = trained_logprobs(self._causal_model(), packed, self.way)
            fields["ref_per_token_logps"] = packed.spread(reference)
        self._inputs = fields
        return fields

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """The model with the weights of the KL term's reference."""
        if self.reference is None:
            with self.model.disable_adapter():
                yield
            return
        held = {name: w.clone() for name, w in get_peft_model_state_dict(self.model).items()}
        set_peft_model_state_dict(self.model, self.reference)
        try:
            yield
        finally:
            set_peft_model_state_dict(self.model, held)

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor, None]:
        assert self._packed is not None
        with self.accelerator.autocast():
            logprobs, entropies = trained_logprobs(
                self._causal_model(), self._packed, self.way, self._entropy_bonus_enabled
            )
        packed = self._packed
        spread = packed.spread if self._rows is None else self._rows.spread
        logged = packed.logprobs.view(-1)[packed.term_place]
        now, then = spread(logprobs), spread(logged)
        weights = None
        if self.recompute:
            mask = spread(torch.ones_like(logged))
            weights = importance_weights(now, then, mask, self.args)
            self._weigh(weights)
        ratios = torch.exp(logprobs.detach().double() - logged.double())
        answers = by_answer(packed, ratios)
        self._seen.append(metrics.Seen(ratios, entropies.detach(), weights, answers))
        return now, spread(entropies), None

    def _weigh(self, weights: Tensor) -> None:
        # TRL reads its inputs after this. Every loss is linear in the advantages' size, so that
        # weights may be put on them; vespo alone asks for the weights themselves.
        if self.loss_type == "vespo":
            self._inputs["importance_sampling_ratio"] = weights
        else:
            self._inputs["advantages"] = self._inputs["advantages"] * weights

    def _causal_model(self) -> nn.Module:
        return cast(nn.Module, self.accelerator.unwrap_model(self.model).get_base_model())


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
