"""What rewards are worth: returns turn by turn, and the advantages of a group's members.

A reward of the episode belongs to every turn of it. A reward of a turn belongs to that turn and,
discounted once per turn, to those before it, which led to it. So turn k of an episode returns

    G[k] = episode + sum over turns j >= k of  turn_discount^(j - k) * turn[j]

and has no return at all where neither it nor anything after it was rewarded: a missing reward is
missing, never 0. With rewards of the episode alone, G is the same for all of its turns.

Members of a group are compared turn by turn. What member i brings to turn k is G_i[k], or, where
its episode was over by then, or not rewarded any more, its last return before. With m_k the mean of
these over the group's n members, and s the root of their variance (n - 1 in the denominator)
averaged over all turns,

    A_i[k] = (G_i[k] - m_k) / (s + 1e-4)

For one reward an episode that is GRPO (Shao et al. 2024, "DeepSeekMath"). `scale_rewards = "batch"`
takes for s the deviation of all scores of the step, `"none"` leaves the division out (Liu et al.
2025, "Dr. GRPO"). `baseline = "leave_one_out"` compares each member with the mean of the others
(Ahmadian et al. 2024, RLOO), which is A_i[k] times n / (n - 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

from gateway.store.baselines import Running

EQUAL = 1e-8
"""Scores that lie within this are equal: their differences teach nothing."""

TINY = 1e-4
"""Keeps the division finite; TRL's."""

SEEN_BEFORE = 8
"""Rewards that a policy's running baseline must hold before anything is compared with it."""

_POLICY_WEIGHT = 4
"""A task's own baseline counts as much as the policy's once it holds so many rewards."""

Returns = Sequence[float | None]
"""By turn, the first one first. The first is never None: it is the score of the whole."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What a member of a group is worth, turn by turn."""

    advantages: tuple[float | None, ...]
    """None where a turn has no return."""
    baselines: tuple[float, ...]
    """What the returns were compared with."""


def returns(
    episode: float | None, turns: Sequence[float | None], discount: float
) -> tuple[float | None, ...]:
    """Rewards of an episode and of its turns → its returns.

    Args:
        episode: sum of the rewards of the whole; None where there are none.
        turns: of each turn the sum of its own rewards; None where there are none.
        discount: `turn_discount`.
    """
    result: list[float | None] = []
    later: float | None = None
    for own in reversed(turns):
        if own is not None or later is not None:
            later = (own or 0.0) + discount * (later or 0.0)
        nothing = episode is None and later is None
        result.append(None if nothing else (episode or 0.0) + (later or 0.0))
    return tuple(result[::-1])


def equal_scores(members: Sequence[Returns]) -> bool:
    """Whether the members of a group are worth the same at every turn."""
    return all(max(column) - min(column) <= EQUAL for column in _columns(members))


def advantages(
    groups: Sequence[Sequence[Returns]], scale: str, leave_one_out: bool = False
) -> list[list[Credit]]:
    """Returns of the members of the groups of a step → their credits, in the same order.

    Args:
        groups: at least two members each, not all of them equal.
        scale: what differences are divided by: `group`, `batch` or `none`, as above.
        leave_one_out: compare each member with the mean of the others.
    """
    batch = [value for group in groups for value in _columns(group)[0]]
    deviation = stdev(batch) if scale == "batch" else 0.0
    result = []
    for group in groups:
        columns = _columns(group)
        if scale == "group":
            deviation = fmean([variance(column) for column in columns]) ** 0.5
        divisor = 1.0 if scale == "none" else deviation + TINY
        means = [fmean(column) for column in columns]
        result.append(
            [_credit(member, means, divisor, len(group) * leave_one_out) for member in group]
        )
    return result


def _columns(members: Sequence[Returns]) -> list[list[float]]:
    """What each member brings to each turn."""
    width = max(len(member) for member in members)
    return [[_at(member, turn) for member in members] for turn in range(width)]


def _at(member: Returns, turn: int) -> float:
    for value in reversed(member[: turn + 1]):
        if value is not None:
            return value
    raise ValueError("an episode that nothing rewarded is not compared")


def _credit(member: Returns, means: Sequence[float], divisor: float, others_of: int) -> Credit:
    advantages: list[float | None] = []
    baselines = []
    for turn, value in enumerate(member):
        mean = means[turn]
        if others_of:
            mean = (others_of * mean - _at(member, turn)) / (others_of - 1)
        baselines.append(mean)
        advantages.append(None if value is None else (value - mean) / divisor)
    return Credit(tuple(advantages), tuple(baselines))


def nothing_beside(member: Returns) -> Credit:
    """The credit of what stands beside others, but has nothing that it may be compared with."""
    values = tuple(value or 0.0 for value in member)
    return Credit(tuple(None if value is None else 0.0 for value in member), values)


def against_running(member: Returns, policy: Running, task: Running, scale: str) -> Credit:
    """The credit of a task that was seen once, against what was seen before it.

    Its baseline is the mean of its task's rewards, drawn towards that of the policy's as long as
    they are few; differences are divided by the deviation of the policy's, if divided at all.
    """
    mean = (task.count * task.mean + _POLICY_WEIGHT * policy.mean) / (task.count + _POLICY_WEIGHT)
    divisor = 1.0 if scale == "none" else policy.variance**0.5 + TINY
    return _credit(member, [mean] * len(member), divisor, 0)
