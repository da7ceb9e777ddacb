"""Posted rewards → what everything that is compared inside a group was worth.

The newest reward of a name counts, for each thing that rewards were posted against: the trajectory,
a completion, one choice of a completion. Named components are summed with the policy's weights.
Rewards of the trajectory belong to the whole episode, those of a completion to its turn, see
`trainer.credit`.

A completion with several choices that were rewarded one by one is several episodes that share a
beginning, and a group of its own unless the client named the group (see `gateway.store.choices`).
Each of its choices is then compared on its own, with the score of the trajectory plus
its own rewards; a turn before it is worth the mean of what it led to; choices without a reward of
their own are left out. A missing reward is missing, never 0: with no reward there is no score.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from statistics import fmean

from gateway.store.records import StoredReward, StoredTrajectory
from trainer.credit import Returns, returns
from trainer.samples import ChoiceKey, CutTrajectory, Turn


@dataclass(frozen=True, slots=True)
class TrajectoryScores:
    """What a trajectory brings to the comparison inside its group."""

    episode: float | None
    """Sum of the rewards of the trajectory itself; None where there are none."""
    turns: dict[str, float]
    """Of each rewarded completion the sum of its rewards."""
    choices: dict[ChoiceKey, float]
    """Scores of choices that were rewarded one by one; if there are any, they are compared."""
    components: dict[str, float] = field(default_factory=dict)
    """The rewards by name, unweighted, each summed over all that it was posted against."""

    @property
    def whole(self) -> float | None:
        """Score of the episode as one; None where nothing rewarded it."""
        if self.episode is None and not self.turns:
            return None
        return (self.episode or 0.0) + sum(self.turns.values())

    def __bool__(self) -> bool:
        return self.whole is not None or bool(self.choices)


_Target = tuple[str | None, int | None]


def score(trajectory: StoredTrajectory, weights: Mapping[str, float]) -> TrajectoryScores:
    """The scores of one trajectory; weights not given are 1."""
    sums: dict[_Target, float] = {}
    components: dict[str, float] = {}
    for (target, name), value in _newest(trajectory).items():
        sums[target] = sums.get(target, 0.0) + weights.get(name, 1.0) * value
        components[name] = components.get(name, 0.0) + value
    turns = {
        completion: value
        for (completion, choice), value in sums.items()
        if completion is not None and choice is None
    }
    shared = TrajectoryScores(sums.get((None, None)), turns, {})
    choices = {
        ChoiceKey(completion, choice): (shared.whole or 0.0) + value
        for (completion, choice), value in sums.items()
        if completion is not None and choice is not None
    }
    # Those of one completion stand together, for they may be compared with each other alone.
    ordered = dict(sorted(choices.items(), key=lambda one: astuple(one[0])))
    return TrajectoryScores(shared.episode, turns, ordered, components)


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


def compared(
    cut: CutTrajectory, scores: TrajectoryScores, discount: float
) -> dict[ChoiceKey | None, Returns]:
    """The returns that a trajectory brings into its group: of what can be trained on.

    The key is None for the trajectory as a whole.
    """
    if scores.choices:
        trainable = {turn.key for turn in cut.turns}
        return {key: (value,) for key, value in scores.choices.items() if key in trainable}
    if scores.whole is None or not cut.turns:
        return {}
    own = [scores.turns.get(completion) for completion in cut.completions]
    episode = scores.episode
    elsewhere = set(scores.turns) - set(cut.completions)
    if elsewhere:
        # Other models' turns have no place among the policy's: their rewards are the episode's.
        episode = (episode or 0.0) + sum(scores.turns[completion] for completion in elsewhere)
    return {None: returns(episode, own, discount)}


def per_turn(
    cut: CutTrajectory, scores: TrajectoryScores, values: Mapping[ChoiceKey | None, Returns]
) -> dict[ChoiceKey, float]:
    """Spread values by turn (returns, advantages) of what was compared over the turns.

    Turns that are missing from the result were not rewarded, and nothing after them was; or they
    were choices without a reward among rewarded ones.
    """
    if None in values:
        place = {completion: index for index, completion in enumerate(cut.completions)}
        by_turn = {turn.key: values[None][place[turn.key.completion_id]] for turn in cut.turns}
        return {key: value for key, value in by_turn.items() if value is not None}
    split = {key.completion_id for key in scores.choices}
    own = {key: value[0] for key, value in values.items() if key is not None}
    single = {key: value for key, value in own.items() if value is not None}
    spread = {}
    for turn in cut.turns:
        value = _inherited(turn, single, split)
        if value is None and turn.key.completion_id not in split and single:
            below = [single[t.key] for t in _below(turn) if t.key in single]
            value = fmean(below or single.values())
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
