"""The numbers of a step: of its data, and of what its forward pass found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.objective import effective_share
from trainer.samples import ChoiceKey

if TYPE_CHECKING:
    from trainer.plan import Plan


def of_data(plan: Plan) -> dict[str, object]:
    """What a plan's data looks like; empty means over everything that was compared."""
    rewards = [score for group in plan.groups for score in group.scores]
    spans = [span for sample in plan.samples for span in sample.spans]
    advantages = [span.advantage for span in spans]
    staleness = [abs(plan.head - span.version) for span in spans]
    members = [member for group in plan.groups for member in group.members]
    names = sorted({name for member in members for name in member.scores.components})
    equal = sum(group.reason == "equal_rewards" for group in plan.groups)
    return {
        "groups": len(plan.teaching),
        "groups_equal": equal,
        "groups_taught_nothing": (len(plan.groups) - len(plan.teaching)) / len(plan.groups),
        "singles": sum(group.single for group in plan.teaching),
        "revised": sum(member.episode.revised for member in members),
        "trajectories": len({sample.trajectory_id for sample in plan.samples}),
        "samples": len(plan.samples),
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "rewards": {
            name: fmean(m.scores.components[name] for m in members if name in m.scores.components)
            for name in names
        },
        "advantage_std": pstdev(advantages),
        "advantage_min": min(advantages),
        "advantage_max": max(advantages),
        "staleness_mean": fmean(staleness),
        "staleness_max": max(staleness),
    }


@dataclass(frozen=True, slots=True)
class Seen:
    """What the forward pass of one pass found, of its M trained tokens."""

    ratios: Tensor
    """Probability under the policy that is trained over that under the one that sampled, (M,)."""
    entropies: Tensor
    """(M,), in nats."""
    weights: Tensor | None
    """Limited weights on the loss, where the old policy is recomputed."""
    answers: dict[ChoiceKey, float]
    """Mean ratio of each answer."""


_RENAMED = {
    "kl": "kl_base",
    "clip_ratio/region_mean": "clip_ratio",
    "clip_ratio/low_mean": "clip_ratio_low",
    "clip_ratio/high_mean": "clip_ratio_high",
    "cispo_clip_ratio": "clip_ratio",
}
"""TRL's names of metrics, and strop's."""


def of_step(logged: Mapping[str, float], seen: Sequence[Seen]) -> dict[str, float]:
    """What an optimiser step found out.

    Args:
        logged: TRL's metrics.
        seen: of its passes.
    """
    ratios = torch.cat([each.ratios for each in seen])
    apart = torch.log(ratios)
    found = {
        "loss": logged["loss"],
        "grad_norm": logged["grad_norm"],
        "learning_rate": logged["learning_rate"],
        "entropy": torch.cat([each.entropies for each in seen]).double().mean().item(),
        "ratio_mean": ratios.mean().item(),
        "ratio_max": ratios.max().item(),
        "ratio_min": ratios.min().item(),
        "effective_sample": effective_share(ratios),
        "kl_sampling": -apart.mean().item(),
        "kl_sampling_abs": apart.abs().mean().item(),
        # Never negative, and of less variance (Schulman's k3).
        "kl_sampling_k3": (ratios - 1 - apart).mean().item(),
    }
    weights = [each.weights.reshape(-1) for each in seen if each.weights is not None]
    if weights:
        found["weight_mean"] = torch.cat(weights).mean().item()
    for theirs, ours in _RENAMED.items():
        if logged.get(theirs) is not None:
            found[ours] = logged[theirs]
    return found
