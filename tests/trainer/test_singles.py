"""Tasks that were seen once, trained against a running baseline."""

import pytest

from gateway.store.baselines import NOTHING, Running
from tests.trainer.steps import outcomes, plan_of, record, release, skip, taught
from tests.trainer.tiny import Turn

PROMPT = [10, 11, 12]


def single(log, name, reward, task=None):
    log.add(name, name, [Turn(PROMPT, [[30]])], reward=reward, task=task)
    log.close_group(name)


def baseline(log, task=""):
    rows = log.rows(f"select mean, variance, count from baselines where task = '{task}'")
    return Running(*rows[0]) if rows else NOTHING


def warm(log, rewards):
    """Let the running baseline see groups that are too few or equal."""
    for number, reward in enumerate(rewards):
        single(log, f"warm{number}", reward)
    skip(log, plan_of(log))


def test_a_running_baseline_begins_as_the_plain_mean_and_variance():
    running = NOTHING
    for value in (1.0, 0.0, 0.5):
        running = running.after(value)
    assert running.mean == pytest.approx(0.5)
    assert running.variance == pytest.approx((0.25 + 0.25) / 3)
    assert running.count == 3


def test_old_rewards_fade_from_a_running_baseline():
    running = Running(0.0, 0.0, 10_000)
    assert running.after(1.0).mean == pytest.approx(0.02)
    for _ in range(400):
        running = running.after(1.0)
    assert running.mean == pytest.approx(1.0, abs=1e-3)


def test_without_the_setting_a_single_is_too_few_and_the_baseline_learns_from_it(make_log):
    log = make_log()
    single(log, "s", 0.5, task="t")
    plan = plan_of(log)
    assert outcomes(plan) == {"s": "too_few"}
    skip(log, plan)
    assert baseline(log) == Running(0.5, 0.0, 1)
    assert baseline(log, "t") == NOTHING


def test_a_single_is_trained_against_the_policys_running_baseline(make_log):
    log = make_log(singles=True)
    warm(log, [0.0, 0.5] * 4)
    assert baseline(log).count == 8
    single(log, "s", 1.0)
    plan = plan_of(log)
    assert taught(plan) == {"c9": 0.75}
    assert plan.groups[0].uses[0].baseline == pytest.approx(0.25)
    record(log, plan)
    (row,) = log.rows("select baseline, advantage from completion_uses where completion_id = 'c9'")
    assert row == pytest.approx((0.25, 0.75))
    assert baseline(log).count == 9


def test_a_single_is_drawn_towards_its_tasks_own_baseline(make_log):
    log = make_log(singles=True)
    warm(log, [0.0, 0.5] * 4)
    for number in range(2):
        single(log, f"s{number}", 1.0, task="t")
        record(log, plan_of(log))
    assert baseline(log, "t") == Running(1.0, 0.0, 2)
    mean = baseline(log).mean
    single(log, "s2", 1.0, task="t")
    assert plan_of(log).groups[0].uses[0].baseline == pytest.approx((2 * 1.0 + 4 * mean) / 6)


def test_a_baseline_that_has_seen_little_is_not_compared_with(make_log):
    log = make_log(singles=True)
    warm(log, [0.0, 0.5] * 3)
    single(log, "s", 1.0)
    assert outcomes(plan_of(log)) == {"s": "too_few"}


def test_singles_wait_until_they_make_a_step(make_log):
    log = make_log(singles=True, group_size=2)
    warm(log, [0.0, 0.5] * 4)
    single(log, "s0", 1.0)
    plan = plan_of(log)
    assert (plan.enough, plan.urgent) == (False, False)
    release(log, plan)
    single(log, "s1", 0.0)
    assert plan_of(log).enough


def test_groups_feed_the_running_baseline_once_however_often_they_are_corrected(make_log):
    log = make_log()
    for number, reward in enumerate((1.0, 0.0)):
        log.add("g", f"t{number}", [Turn(PROMPT, [[30 + number]])], reward=reward)
    record(log, plan_of(log))
    assert baseline(log) == Running(0.5, 0.25, 2)
    log.reward(-1.0, trajectory_id="t0")
    record(log, plan_of(log))
    assert baseline(log) == Running(0.5, 0.25, 2)
