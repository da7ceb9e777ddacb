"""The statistics by which versions are taken back or promoted."""

import numpy as np
import pytest

from gateway.comparison import Scored, compare, level_of_look, next_look, samples_of


def scored(rewards, tasks=None):
    return [
        Scored(f"t{index if tasks is None else tasks[index]}", float(reward), float(index))
        for index, reward in enumerate(rewards)
    ]


def worse(new, old, level=0.01, **options):
    return compare(samples_of(scored(new, **options), scored(old, **options)), level).worse


def test_a_plain_difference_is_seen_and_its_direction_too():
    tasks = [n % 4 for n in range(16)]
    good, bad = [1.0] * 14 + [0.0] * 2, [0.0] * 14 + [1.0] * 2
    assert worse(bad, good, tasks=tasks) < 1e-3
    assert worse(good, bad, tasks=tasks) > 0.99
    # Without any spread on either side, which a t-test cannot take.
    assert worse([0.0] * 8, [1.0] * 8, tasks=[0] * 8) < 1e-3


def test_the_p_value_of_a_tiny_case_is_the_exact_one():
    # All 3 of one against all 3 of the other: one arrangement of 20 is as extreme.
    found = compare(samples_of(scored([0, 0, 0], [0] * 3), scored([1, 1, 1], [0] * 3)), 1e-3)
    assert found.worse == pytest.approx(1 / 20, abs=0.015)


def test_few_samples_never_condemn():
    assert worse([0.0, 0.0], [1.0, 1.0], tasks=[0, 0]) > 0.1
    assert worse([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]) >= 0.03


def test_harder_tasks_are_not_the_versions_fault():
    # Task 0 gives 1, task 1 gives 0, whoever tries; the new version met task 1 more often.
    new = scored([1] * 4 + [0] * 20, [0] * 4 + [1] * 20)
    old = scored([1] * 20 + [0] * 4, [0] * 20 + [1] * 4)
    assert compare(samples_of(new, old), 0.01).worse > 0.5
    # Not looking at tasks would condemn it.
    pooled = samples_of(
        [Scored("t", s.reward, s.at) for s in new], [Scored("t", s.reward, s.at) for s in old]
    )
    assert compare(pooled, 0.01).worse < 1e-3


def test_trajectories_of_one_task_are_not_taken_for_independent_ones():
    # Different tasks on each side, eight trajectories that all agree in each: 3 samples, not 24.
    new = scored([0.0] * 24, [n // 8 for n in range(24)])
    old = scored([1.0] * 24, [10 + n // 8 for n in range(24)])
    samples = samples_of(new, old)
    assert (samples.unit, len(samples.new)) == ("tasks", 3)
    assert compare(samples, 0.01).worse >= 0.03


def test_the_levels_of_all_looks_add_up_to_the_level():
    assert sum(level_of_look(0.05, look) for look in range(1, 10_000)) == pytest.approx(0.05, 1e-3)
    assert [next_look(8, looks) for looks in range(4)] == [8, 16, 32, 64]


def test_a_version_that_is_no_worse_is_condemned_as_rarely_as_stated_though_one_looks_often():
    level, looks, runs = 0.2, 4, 250
    dice = np.random.default_rng(7)
    honest = naive = 0
    for _ in range(runs):
        old = scored(dice.random(64) < 0.6, [n % 8 for n in range(64)])
        new = scored(dice.random(64) < 0.6, [n % 8 for n in range(64)])
        found = [
            compare(samples_of(new[: 8 << look], old), level_of_look(level, look + 1)).worse
            for look in range(looks)
        ]
        honest += any(p <= level_of_look(level, look + 1) for look, p in enumerate(found))
        naive += any(p <= level for p in found)
    # 0.2 of 250 and three standard deviations; and what looking again and again would do.
    assert honest <= 50 + 19
    assert naive > honest
    assert naive > 50
