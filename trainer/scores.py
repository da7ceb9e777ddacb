"""Posted rewards → one score for everything that is compared inside a group.

The newest reward of a name counts, for each thing that rewards were posted against: the trajectory,
a completion, one choice of a completion. Named components are summed with the policy's weights.
What is compared is the episode:

    score(trajectory) = its own rewards + the rewards of all of its completions

and every sampled token of the episode gets the advantage of that score. (Credit for the single turn
is not attempted here: a turn's reward raises or lowers its whole episode.)

A completion with several choices that were rewarded one by one is several episodes that share a
beginning. Each of its choices is then compared on its own, with the score of the trajectory plus
its own rewards; a turn before it is worth the mean of what it led to; choices without a reward of
their own are left out. A missing reward is missing, never 0: with no reward there is no score.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from gateway.store.records import StoredReward, StoredTrajectory
from trainer.samples import ChoiceKey, CutTrajectory, Turn


@dataclass(frozen=True, slots=True)
class TrajectoryScores:
    """What a trajectory brings to the comparison inside its group."""

    whole: float | None
    """Score of the episode as one; None where nothing rewarded it."""
    choices: dict[ChoiceKey, float]
    """Scores of choices that were rewarded one by one; if there are any, they are compared."""

    def __bool__(self) -> bool:
        return self.whole is not None or bool(self.choices)


_Target = tuple[str | None, int | None]


def score(trajectory: StoredTrajectory, weights: Mapping[str, float]) -> TrajectoryScores:
    """The scores of one trajectory; weights not given are 1."""
    sums: dict[_Target, float] = {}
    for (target, name), value in _newest(trajectory).items():
        sums[target] = sums.get(target, 0.0) + weights.get(name, 1.0) * value
    shared = [value for (_, choice), value in sums.items() if choice is None]
    whole = sum(shared) if shared else None
    choices = {
        ChoiceKey(completion, choice): (whole or 0.0) + value
        for (completion, choice), value in sums.items()
        if completion is not None and choice is not None
    }
    return TrajectoryScores(whole, choices)


def _newest(trajectory: StoredTrajectory) -> dict[tuple[_Target, str], float]:
    answers = {completion.id: len(completion.choices) for completion in trajectory.completions}
    newest: dict[tuple[_Target, str], float] = {}
    for reward in sorted(trajectory.rewards, key=lambda r: r.created_at):
        # Sorting is stable: of two of the same instant, the one stored later counts.
        newest[_target(reward, answers), reward.name] = reward.reward
    return newest


def _target(reward: StoredReward, answers: Mapping[str, int]) -> _Target:
    if reward.completion_id is None:
        return None, None
    only = answers.get(reward.completion_id, 1) <= 1
    return reward.completion_id, None if only else reward.choice


def compared(cut: CutTrajectory, scores: TrajectoryScores) -> dict[ChoiceKey | None, float]:
    """The scores that a trajectory brings into its group's mean: of what can be trained on.

    The key is None for the trajectory as a whole.
    """
    if scores.choices:
        trainable = {turn.key for turn in cut.turns}
        return {key: value for key, value in scores.choices.items() if key in trainable}
    if scores.whole is None or not cut.turns:
        return {}
    return {None: scores.whole}


def per_turn(
    cut: CutTrajectory, scores: TrajectoryScores, values: Mapping[ChoiceKey | None, float]
) -> dict[ChoiceKey, float]:
    """Spread values (scores, or advantages) of what was compared over the turns.

    Turns that are missing from the result were choices without a reward among rewarded ones.
    """
    if None in values:
        return {turn.key: values[None] for turn in cut.turns}
    split = {key.completion_id for key in scores.choices}
    own = {key: value for key, value in values.items() if key is not None}
    spread = {}
    for turn in cut.turns:
        value = _inherited(turn, own, split)
        if value is None and turn.key.completion_id not in split and own:
            below = [own[t.key] for t in _below(turn) if t.key in own]
            value = fmean(below or own.values())
        if value is not None:
            spread[turn.key] = value
    return spread


def _inherited(turn: Turn, own: Mapping[ChoiceKey, float], split: set[str]) -> float | None:
    for ancestor in reversed(turn.line()):
        if ancestor.key in own:
            return own[ancestor.key]
        if ancestor.key.completion_id in split:
            return None
    return None


def _below(turn: Turn) -> list[Turn]:
    found, waiting = [], list(turn.children)
    while waiting:
        found.append(waiting.pop())
        waiting.extend(found[-1].children)
    return found
