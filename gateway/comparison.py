"""Whether one version's rewards are worse than another's by more than chance.

The test is a permutation test with Welch's studentised difference of means (Janssen 1997; Chung and
Romano 2013, "Exact and asymptotically robust permutation tests"): if the two versions do equally
well its level is exact for any number of samples and any distribution of rewards, binary ones
among them, and nearly so where only their means are equal. It has no formula that needs many
samples: with few, it says that nothing can be told.

Trajectories are compared inside their task (group), as far as both versions met the same tasks:
labels are permuted within each task, so that a version is not blamed for having met harder ones.
Where they met mostly different tasks, a task's mean reward is one sample, because the trajectories
of a task resemble each other. What counts is chosen by the numbers of trajectories, not by rewards.

Repeated looks are paid for: look k = 1, 2, … happens when the version has `first`·2^(k-1) samples,
and has the level `level / (k (k + 1))`, which adds up to `level` however often one looks. A version
that is compared with the best of m earlier ones is held to `level / m` (Bonferroni), because the
best of many is partly luck.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 500
_ENOUGH = 50
"""Permutations at least as extreme after which a p-value is clear (Besag and Clifford 1991)."""
_MOST_DRAWS = 200_000
_MOST_SAMPLES = 400

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scored:
    """A trajectory that was rewarded."""

    task: str
    reward: float
    at: float
    """When it began, Unix seconds."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Two versions side by side, ready to be compared."""

    new: _Floats
    old: _Floats
    new_strata: NDArray[np.int64]
    old_strata: NDArray[np.int64]
    unit: str
    """`trajectories` of shared tasks, or `tasks`."""
    new_count: int
    old_count: int
    """How many there are; the arrays hold the newest of them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a look found."""

    new_mean: float
    old_mean: float
    new_error: float
    """Standard error of the mean."""
    old_error: float
    new_samples: int
    old_samples: int
    unit: str
    worse: float
    """p-value of "the new one is not worse"."""
    better: float
    """p-value of "the new one is not better"."""

    def numbers(self) -> dict[str, Any]:
        """For the database."""
        return {name: getattr(self, name) for name in self.__slots__}

    def words(self) -> str:
        """The means, with their standard errors."""
        return (
            f"{self.new_mean:.3f} ± {self.new_error:.3f} over {self.new_samples} {self.unit} "
            f"against {self.old_mean:.3f} ± {self.old_error:.3f} over {self.old_samples}"
        )


def level_of_look(level: float, look: int) -> float:
    """The level of look number 1, 2, …; over all looks they add up to `level`."""
    return level / (look * (look + 1))


def next_look(first: int, looks: int) -> int:
    """Samples that are needed for the look after `looks` looks."""
    return first << looks


def samples_of(new: Sequence[Scored], old: Sequence[Scored]) -> Samples:
    """What to compare: trajectories of shared tasks, or the means of tasks."""
    shared = {s.task for s in new} & {s.task for s in old}
    ours = [s for s in new if s.task in shared]
    theirs = [s for s in old if s.task in shared]
    unit = "trajectories"
    if 2 * len(ours) < len(new) or not shared:
        ours, theirs, shared, unit = _by_task(new), _by_task(old), {""}, "tasks"
    number = {task: index for index, task in enumerate(sorted(shared))}
    parts = []
    for side in (ours, theirs):
        newest = sorted(side, key=lambda s: s.at)[-_MOST_SAMPLES:]
        parts.append(
            (
                np.array([s.reward for s in newest], np.float64),
                np.array([number[s.task] for s in newest], np.int64),
            )
        )
    (a, strata_a), (b, strata_b) = parts
    return Samples(a, b, strata_a, strata_b, unit, len(ours), len(theirs))


def compare(samples: Samples, level: float, seed: int = 0) -> Comparison:
    """The two p-values, precise enough to be held against `level`.

    Args:
        samples: at least two on each side.
        level: the smaller it is, the more permutations are drawn.
        seed: of the permutations; the same data and seed give the same answer.
    """
    values = np.concatenate([samples.new, samples.old])
    strata = np.concatenate([samples.new_strata, samples.old_strata])
    is_new = np.arange(len(values)) < len(samples.new)
    order = np.argsort(strata, kind="stable")
    values, strata, is_new = values[order], strata[order], is_new[order]
    counts = np.bincount(strata)
    centred = values - (np.bincount(strata, values) / np.maximum(counts, 1))[strata]
    seen = _statistic(centred[None, :], is_new)[0]
    dice = np.random.default_rng(seed)
    most = int(min(_MOST_DRAWS, max(2000, 20 / level)))
    low = high = drawn = 0
    while drawn < most and not (low >= _ENOUGH and high >= _ENOUGH):
        # Keys of a later task are larger: sorting shuffles inside tasks only.
        keys = dice.random((_CHUNK, len(values))) + strata
        found = _statistic(centred[np.argsort(keys, axis=1)], is_new)
        low += int((found <= seen + 1e-9).sum())
        high += int((found >= seen - 1e-9).sum())
        drawn += _CHUNK
    return Comparison(
        new_mean=float(samples.new.mean()),
        old_mean=float(samples.old.mean()),
        new_error=_error(samples.new),
        old_error=_error(samples.old),
        new_samples=len(samples.new),
        old_samples=len(samples.old),
        unit=samples.unit,
        worse=(1 + low) / (1 + drawn),
        better=(1 + high) / (1 + drawn),
    )


def _statistic(rows: _Floats, is_new: NDArray[np.bool_]) -> _Floats:
    """Welch's t of new minus old for each row."""
    new, old = rows[:, is_new], rows[:, ~is_new]
    difference = new.mean(1) - old.mean(1)
    variance = _variance(new) / new.shape[1] + _variance(old) / old.shape[1]
    tiny = variance <= 1e-18
    scaled = difference / np.sqrt(np.where(tiny, 1.0, variance))
    # Without any spread a difference is as large as it can be.
    return np.where(tiny & (np.abs(difference) > 1e-12), np.sign(difference) * 1e12, scaled)


def _variance(rows: _Floats) -> _Floats:
    if rows.shape[1] < 2:
        return np.zeros(len(rows))
    return np.asarray(rows.var(axis=1, ddof=1))


def _error(values: _Floats) -> float:
    if len(values) < 2:
        return 0.0
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def _by_task(scored: Sequence[Scored]) -> list[Scored]:
    tasks: dict[str, list[Scored]] = {}
    for one in scored:
        tasks.setdefault(one.task, []).append(one)
    return [
        Scored("", sum(s.reward for s in of_task) / len(of_task), max(s.at for s in of_task))
        for of_task in tasks.values()
    ]
