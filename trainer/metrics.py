"""The numbers of a step."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import TYPE_CHECKING

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
