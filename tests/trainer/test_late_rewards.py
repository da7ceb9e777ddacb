"""Rewards that come, change or are withdrawn after their trajectory was decided about."""

import pytest
from sqlalchemy import update

from gateway.store.models import Policy, Reward
from gateway.store.revisions import reward_changed
from tests.trainer.steps import outcomes, plan_of, record, release, skip, taught
from tests.trainer.tiny import Turn

PROMPT = [10, 11, 12]


@pytest.fixture
def used(make_log):
    """A group of two that a step has trained on, with advantages 0.5 and -0.5."""
    log = make_log()
    for number, reward in enumerate((1.0, 0.0)):
        log.add("g", f"t{number}", [Turn(PROMPT, [[30 + number]])], reward=reward)
    record(log, plan_of(log))
    assert plan_of(log).groups == []
    return log


def test_a_corrected_reward_is_trained_on_with_what_it_changes(used):
    used.reward(-1.0, trajectory_id="t0")
    plan = plan_of(used)
    # It was taught 0.5, and should have been taught -0.5: between -1 and 0, the mean is -0.5.
    assert taught(plan) == {"c1": -1.0}
    (use,) = plan.groups[0].uses
    assert (use.revision, use.baseline, use.reward) == (2, -0.5, -1.0)
    assert outcomes(plan) == {"t0": None}


def test_a_revision_is_used_once_and_the_next_one_again(used):
    used.reward(-1.0, trajectory_id="t0")
    step = record(used, plan_of(used))
    assert plan_of(used).groups == []
    assert used.trajectory("t0").step_id == step
    used.reward(1.0, trajectory_id="t0")
    plan = plan_of(used)
    # Taught 0.5 - 1.0 so far, and 0.5 is right.
    assert taught(plan) == {"c1": 1.0}


def test_the_same_reward_again_is_no_news(used):
    used.reward(1.0, trajectory_id="t0")
    assert plan_of(used).groups == []


def test_a_reward_of_another_name_is_news(used):
    used.reward(0.5, trajectory_id="t0", name="style")
    # 1.5 against a mean of 0.75, of which 0.5 was taught.
    assert taught(plan_of(used)) == {"c1": 0.25}


def test_a_withdrawn_reward_leaves_what_was_used_as_it_is_and_says_so(used):
    with used.database.write() as connection:
        connection.execute(
            update(Reward).where(Reward.trajectory_id == "t0").values(withdrawn_at=1.0)
        )
        reward_changed(connection, "default", "t0", 1.0)
    plan = plan_of(used)
    assert outcomes(plan) == {"t0": "no_reward"}
    skip(used, plan)
    assert used.states()["t0"] == ("used", "no_reward")
    assert plan_of(used).groups == []


def test_a_reward_that_makes_equal_ones_different_teaches_all_of_them(make_log):
    log = make_log()
    for number in range(2):
        log.add("g", f"t{number}", [Turn(PROMPT, [[30 + number]])], reward=1.0)
    plan = plan_of(log)
    assert plan.teaching == []
    skip(log, plan)
    log.reward(0.0, trajectory_id="t0")
    plan = plan_of(log)
    assert taught(plan) == {"c1": -0.5, "c2": 0.5}
    record(log, plan)
    assert plan_of(log).groups == []
    assert set(log.states().values()) == {("used", None)}


def test_a_reward_that_makes_different_ones_equal_takes_back_what_was_taught(used):
    used.reward(0.0, trajectory_id="t0")
    assert taught(plan_of(used)) == {"c1": -0.5}


def test_a_first_reward_that_comes_late_is_compared_with_what_was_used(make_log):
    log = make_log()
    for number, reward in enumerate((1.0, 0.0)):
        log.add("g", f"t{number}", [Turn(PROMPT, [[30 + number]])], reward=reward)
    log.add("g", "t2", [Turn(PROMPT, [[32]])])
    log.close_group("g")
    plan = plan_of(log)
    # The one without a reward touches nobody's baseline.
    assert {use.baseline for use in plan.groups[0].uses if use.reason is None} == {0.5}
    record(log, plan)
    assert log.states()["t2"] == ("skipped", "no_reward")
    log.reward(1.0, trajectory_id="t2")
    plan = plan_of(log)
    assert taught(plan) == {"c3": round(1 - 2 / 3, 6)}
    assert outcomes(plan) == {"t2": None}


def test_a_reward_that_comes_while_a_step_runs_is_not_lost(make_log):
    log = make_log()
    for number, reward in enumerate((1.0, 0.0)):
        log.add("g", f"t{number}", [Turn(PROMPT, [[30 + number]])], reward=reward)
    plan = plan_of(log)
    log.reward(-1.0, trajectory_id="t0")
    record(log, plan)
    assert log.states() == {"t0": ("open", None), "t1": ("used", None)}
    assert taught(plan_of(log)) == {"c1": -1.0}


def test_what_a_rollback_left_behind_was_not_taught(used):
    with used.database.write() as connection:
        connection.execute(update(Policy).values(head=0))
    used.reward(-1.0, trajectory_id="t0")
    assert taught(plan_of(used)) == {"c1": -0.5}


def test_a_late_reward_of_what_is_too_old_is_stale_and_the_step_that_used_it_stays(used):
    step = used.trajectory("t0").step_id
    used.move_head(20)
    used.reward(-1.0, trajectory_id="t0")
    plan = plan_of(used)
    assert outcomes(plan) == {"t0": "stale"}
    skip(used, plan)
    assert used.states()["t0"] == ("used", "stale")
    assert used.trajectory("t0").step_id == step


def test_corrections_wait_for_a_whole_step(make_log):
    log = make_log(groups_per_step=2)
    for group in "gh":
        for number, reward in enumerate((1.0, 0.0)):
            log.add(group, f"{group}{number}", [Turn(PROMPT, [[30 + number]])], reward=reward)
    record(log, plan_of(log))
    log.reward(-1.0, trajectory_id="g0")
    plan = plan_of(log)
    assert (plan.enough, plan.urgent) == (False, False)
    release(log, plan)
    log.reward(-1.0, trajectory_id="h0")
    assert plan_of(log).enough


def test_a_reward_of_a_turn_that_comes_late_changes_the_turns_that_it_reaches(make_log):
    log = make_log()
    turns = [Turn(PROMPT, [[30]]), Turn([*PROMPT, 30, 9], [[31]])]
    first, second = log.add("g", "a", turns, reward=1.0)
    log.add("g", "b", turns, reward=0.0)
    record(log, plan_of(log))
    log.reward(1.0, completion_id=first)
    plan = plan_of(log)
    # Only the first turn returns more than before: 2 against 0.
    assert taught(plan) == {first: 0.5, second: 0.0}


def test_what_age_has_left_too_little_of_is_stale(make_log, base_model, trainer_settings):
    from tests.trainer import tiny
    from trainer.worker import Worker

    log = make_log(min_effective_sample=0.5)
    prompt, answer = [10, 11, 12], [40, 41, 42, 43]
    now = tiny.logprobs(base_model, prompt, answer)
    # One of its tokens would weigh e^6 times as much as the others.
    far = [now[0] - 6.0, *now[1:]]
    log.add("g", "t0", [Turn(prompt, [answer], [now], version=3)], reward=1.0)
    log.add("g", "t1", [Turn(prompt, [answer], [far], version=3)], reward=0.0)
    log.move_head(1)
    assert Worker(log.database, log.artifacts, trainer_settings).run(once=True)
    assert log.states() == {"t0": ("used", None), "t1": ("skipped", "stale")}
    rows = log.rows("select completion_id, advantage, tokens, reason, ratio from completion_uses")
    found = {row[0]: row[1:] for row in rows}
    # It is not trained on, and was compared with all the same.
    assert found["c2"][:3] == (None, 0, "stale")
    assert found["c1"][0] == pytest.approx(0.5 / (0.5**0.5 + 1e-4))
    assert found["c1"][3] == pytest.approx(1.0, abs=1e-3)
