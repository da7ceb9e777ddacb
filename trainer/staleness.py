"""Trajectories of which age has left too little: their effective sample size.

A trajectory that versions lie behind is trained on with importance weights, and where a few of its
tokens weigh as much as all the others, little is left to learn from. How little is said by

    (sum w)^2 / (n sum w^2)

over its n sampled tokens: 1 where all weigh the same, 1 / n where one of them has all the weight.
"""

from collections.abc import Callable, Mapping

from trainer.model import ModelError
from trainer.plan import Plan
from trainer.samples import STALE, Sample


def aged(plan: Plan) -> list[Sample]:
    """Samples of trajectories that more than one version lies between, if that is looked at."""
    if not plan.settings.min_effective_sample:
        return []
    old = {
        sample.trajectory_id
        for sample in plan.samples
        for span in sample.spans
        if abs(plan.head - span.version) > 1
    }
    return [sample for sample in plan.samples if sample.trajectory_id in old]


def drop_aged(plan: Plan, shares_of: Callable[[list[Sample]], Mapping[str, float]]) -> None:
    """Take what age has left too little of out of a plan, which is changed in place."""
    old = aged(plan)
    if not old:
        return
    try:
        shares = shares_of(old)
    except ModelError:
        # A model that cannot be loaded fails the step, and there it is put on record.
        return
    drop_stale(plan, shares)


def drop_stale(plan: Plan, shares: Mapping[str, float]) -> None:
    """Take trajectories out of a plan of which too little is left to learn from.

    Args:
        plan: changed in place.
        shares: of samples' trajectories the effective sample size, as a share of their tokens.
    """
    least = plan.settings.min_effective_sample
    stale = {id for id, share in shares.items() if share < least}
    if not stale:
        return
    for group in plan.groups:
        members = [member for member in group.members if member.episode.id in stale]
        gone = {part.id for member in members for part in member.episode.parts}
        group.samples = [s for s in group.samples if s.trajectory_id not in stale]
        for use in group.uses:
            if use.trajectory_id in gone and use.reason is None:
                use.reason, use.tokens, use.advantage = STALE, 0, None
        for outcome in group.outcomes:
            if outcome.trajectory_id in gone and outcome.reason is None:
                outcome.reason = STALE
        if group.reason is None and not group.samples:
            group.reason = STALE
