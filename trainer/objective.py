"""Importance weights between the policy that sampled and the policy that is trained.

Rows. The loss is laid out (R, W): a row is a trajectory, with the sampled tokens of all of its
threads one after the other. So a loss that averages over rows, or takes one ratio for a whole row,
gives a trajectory the same weight however many sequences it was cut into.

Old policy. With `old_policy = "logged"` the ratio that is clipped is pi(t) / mu(t), with mu the
logged probability: one number for all that lies between sampling and training. With `"recomputed"`
the old policy is the one at the step's start, so that the clipped ratio is 1 and clips nothing, and
what lies between sampling and then is a weight on the loss that no gradient goes through (Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy training"):

    w(t) = pi_start(t) / mu(t),   or of the whole row: the product over its tokens

limited as TRL's `vllm_importance_sampling_mode` says: `token_truncate`, `token_mask`,
`sequence_truncate`, `sequence_mask`; truncated weights are clamped between
`vllm_importance_sampling_clip_min` and `_clip_max`, masked ones are 0 outside of them. One
optimiser step is taken at a time, so pi_start is the policy of the step's own forward pass.

Temperature is part of both probabilities, token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer.packing import PackedStep
from trainer.samples import ChoiceKey

ROW_MEANS = ("grpo", "sapo", "luspo", "dr_grpo")
"""Losses that TRL divides by the number of rows of a pass."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the trained tokens of a pass lie in the loss, by trajectory."""

    place: Tensor
    """r * W + w of each trained token, (M,)."""
    shape: tuple[int, int]
    """R, W."""
    share: Tensor
    """Of each row the share of its trajectory's trained tokens that are in this pass, (R, 1)."""

    def spread(self, terms: Tensor) -> Tensor:
        """Values of the M trained tokens → (R, W), 0 elsewhere; differentiable."""
        flat = terms.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.place,), terms).view(self.shape)


def rows_of(packed: PackedStep, trained: dict[str, int]) -> Rows:
    """The rows of a pass.

    Args:
        packed: its terms are in the order of samples and spans.
        trained: tokens of each trajectory in the whole step, by its id.
    """
    filled: dict[str, int] = {}
    numbers: dict[str, int] = {}
    rows: list[int] = []
    columns: list[int] = []
    for sample in packed.samples:
        row = numbers.setdefault(sample.trajectory_id, len(numbers))
        start = filled.get(sample.trajectory_id, 0)
        filled[sample.trajectory_id] = start + sample.trained
        rows.extend([row] * sample.trained)
        columns.extend(range(start, start + sample.trained))
    width = max(filled.values())
    device = packed.term_place.device
    place = torch.tensor(rows, device=device) * width + torch.tensor(columns, device=device)
    share = [[filled[id] / trained[id]] for id in numbers]
    return Rows(place, (len(numbers), width), torch.tensor(share, device=device))


def trained_by_trajectory(passes: Sequence[PackedStep]) -> dict[str, int]:
    """How many tokens of each trajectory a step trains on."""
    trained: dict[str, int] = {}
    for packed in passes:
        for sample in packed.samples:
            trained[sample.trajectory_id] = trained.get(sample.trajectory_id, 0) + sample.trained
    return trained


def passes_for(
    loss_type: str, packed: PackedStep, rows: int, trajectories: int, tokens: int
) -> float:
    """What TRL has to believe the number of passes to be, so that passes add up to the step.

    TRL averages within a pass and divides by the number of passes, as if all were alike.

    Args:
        loss_type: TRL's.
        packed: the pass.
        rows: of the pass.
        trajectories: of the step.
        tokens: trained ones of the step.
    """
    if loss_type in ROW_MEANS:
        return trajectories / rows
    if loss_type == "bnpo":
        return tokens / packed.trained
    return 1.0


def importance_weights(now: Tensor, logged: Tensor, mask: Tensor, config: Any) -> Tensor:
    """Weights between sampling and training policy, (R, W) or (R, 1); no gradient.

    Args:
        now: logprobs at the step's start, (R, W).
        logged: those at sampling, (R, W).
        mask: 1 where a token is trained, (R, W).
        config: `vllm_importance_sampling_mode`, `_clip_min` and `_clip_max` of it are used.
    """
    apart = (now.detach() - logged) * mask
    mode = config.vllm_importance_sampling_mode
    if mode.startswith("sequence"):
        apart = apart.sum(-1, keepdim=True)
    weights = torch.exp(apart)
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    if mode.endswith("truncate"):
        return weights if low is None and high is None else torch.clamp(weights, low, high)
    outside = torch.zeros_like(weights, dtype=torch.bool)
    if low is not None:
        outside |= weights < low
    if high is not None:
        outside |= weights > high
    return weights.masked_fill(outside, 0.0)


def effective_share(weights: Tensor) -> float:
    """Effective sample size of weights (N,), as a share of N: (sum w)^2 / (N sum w^2)."""
    weights = weights.double()
    squares = (weights * weights).sum()
    if not bool(squares > 0):
        return 0.0
    return float(weights.sum() ** 2 / (len(weights) * squares))


def by_trajectory(packed: PackedStep, ratios: Tensor) -> dict[str, Tensor]:
    """Ratios of the trained tokens (M,), of each trajectory."""
    found: dict[str, list[Tensor]] = {}
    parts = _split(ratios, [sample.trained for sample in packed.samples])
    for sample, part in zip(packed.samples, parts, strict=True):
        found.setdefault(sample.trajectory_id, []).append(part)
    return {id: torch.cat(parts) for id, parts in found.items()}


def by_answer(packed: PackedStep, ratios: Tensor) -> dict[ChoiceKey, float]:
    """Mean of the ratios of the trained tokens (M,), of each answer."""
    spans = [span for sample in packed.samples for span in sample.spans]
    parts = _split(ratios, [span.stop - span.start for span in spans])
    return {span.key: float(part.mean()) for span, part in zip(spans, parts, strict=True)}


def _split(values: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = cast(Any, values).split(lengths)
    return parts
