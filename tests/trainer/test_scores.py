"""Rewards → scores, and groups → plans."""

import pytest

from tests.trainer.tiny import Turn
from trainer import scores
from trainer.plan import make_plan
from trainer.samples import ChoiceKey

PROMPT = [10, 11, 12]


def one(log, group, trajectory, reward=None, version=0, **turn):
    rewards = {} if reward is None else {"reward": reward}
    number = int(trajectory.removeprefix("t")) if trajectory.startswith("t") else 0
    log.add(group, trajectory, [Turn(PROMPT, [[30 + number]], version=version, **turn)], **rewards)


def plan_of(log):
    return make_plan(log.policy, log.claim(), log.settings, "group")


def outcomes(plan):
    return {o.trajectory_id: o.reason for group in plan.groups for o in group.outcomes}


def test_the_newest_reward_of_a_name_counts(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    log.reward(0.25, trajectory_id="t1")
    assert scores.score(log.trajectory("t1"), {}).whole == 0.25


def test_named_rewards_are_summed_with_the_policys_weights(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    log.reward(0.5, trajectory_id="t1", name="style")
    log.reward(3.0, trajectory_id="t1", name="cost")
    assert scores.score(log.trajectory("t1"), {"style": 2.0, "cost": -0.1}).whole == pytest.approx(
        1.7
    )


def test_rewards_of_turns_add_to_that_of_the_episode(make_log):
    log = make_log()
    first, second = log.add(
        "g", "t1", [Turn(PROMPT, [[30]]), Turn([*PROMPT, 30, 9], [[31]])], reward=1
    )
    log.reward(0.5, completion_id=first)
    log.reward(0.7, completion_id=second)
    log.reward(0.25, completion_id=second, choice=0)
    assert scores.score(log.trajectory("t1"), {}).whole == pytest.approx(1.75)


def test_no_reward_is_no_score_and_a_reward_of_0_is_one(make_log):
    log = make_log()
    one(log, "g", "t1")
    one(log, "g", "t2", 0.0)
    assert not scores.score(log.trajectory("t1"), {})
    assert scores.score(log.trajectory("t2"), {}).whole == 0.0


def test_choices_that_were_rewarded_one_by_one_are_compared_with_each_other(make_log):
    log = make_log()
    first, second = log.add(
        "g", "t1", [Turn(PROMPT, [[30]]), Turn([*PROMPT, 30, 9], [[31], [32], [33]])]
    )
    log.reward(1.0, completion_id=second, choice=0)
    log.reward(0.0, completion_id=second, choice=1)
    log.close_group("g")
    (group,) = plan_of(log).groups
    uses = {(u.completion_id, u.choice): u for u in group.uses}
    assert uses[second, 0].advantage == pytest.approx(-uses[second, 1].advantage)
    assert uses[second, 0].advantage > 0
    assert uses[second, 2].reason == "no_reward"
    assert uses[first, 0].advantage == pytest.approx(0.0)
    assert group.scores == [1.0, 0.0]
    assert len(group.samples) == 2


def test_choices_in_a_group_of_their_own_are_compared_within_their_completion_alone(make_log):
    log = make_log()
    turns = [Turn(PROMPT, [[30], [31]]), Turn([*PROMPT, 30, 9], [[32], [33]])]
    first, second = log.add("task-x", "t1", turns)
    one(log, "task-x", "t2", 100.0)
    with log.database.write() as connection:
        connection.exec_driver_sql("update groups set task = 'x'")
    for index, (early, late) in enumerate([(1.0, 50.0), (0.0, 60.0)]):
        log.reward(early, completion_id=first, choice=index)
        log.reward(late, completion_id=second, choice=index)
    (group,) = plan_of(log).groups
    assert group.claimed.id == f"choices-{first}"
    uses = {(u.completion_id, u.choice): u.advantage for u in group.uses}
    for name, better in ((first, 0), (second, 1)):
        assert uses[name, better] == pytest.approx(-uses[name, 1 - better])
        assert uses[name, better] > 0.5


def test_a_turn_is_worth_the_mean_of_the_choices_that_it_led_to(make_log):
    log = make_log()
    names = log.add("g", "t1", [Turn(PROMPT, [[30]]), Turn([*PROMPT, 30, 9], [[31], [32]])])
    log.reward(1.0, completion_id=names[1], choice=0)
    log.reward(0.0, completion_id=names[1], choice=1)
    one(log, "g", "t2", -1.0)
    log.close_group("g")
    (group,) = plan_of(log).groups
    uses = {(u.completion_id, u.choice): u.advantage for u in group.uses}
    assert uses[names[0], 0] == pytest.approx((uses[names[1], 0] + uses[names[1], 1]) / 2)
    assert ChoiceKey(names[1], 0) in {span.key for s in group.samples for span in s.spans}


def test_equal_rewards_teach_nothing(make_log):
    log = make_log()
    one(log, "g", "t1", 0.5)
    one(log, "g", "t2", 0.5)
    plan = plan_of(log)
    assert plan.teaching == []
    assert outcomes(plan) == {"t1": "equal_rewards", "t2": "equal_rewards"}
    assert {u.reason for u in plan.groups[0].uses} == {"equal_rewards"}


def test_a_missing_reward_is_not_0_and_leaves_its_trajectory_waiting(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    one(log, "g", "t2", 0.0)
    one(log, "g", "t3")
    plan = plan_of(log)
    assert plan.groups[0].scores == [1.0, 0.0]
    assert outcomes(plan) == {"t1": None, "t2": None}


def test_a_missing_reward_is_left_out_for_good_once_the_group_is_closed(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    one(log, "g", "t2", 0.0)
    one(log, "g", "t3")
    log.close_group("g")
    assert outcomes(plan_of(log))["t3"] == "no_reward"


def test_one_rewarded_member_of_a_closed_group_is_too_few(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    log.close_group("g")
    assert outcomes(plan_of(log)) == {"t1": "too_few"}


def test_what_cannot_be_trained_on_is_not_compared_and_says_why(make_log):
    log = make_log(group_size=3, max_staleness=2)
    log.move_head(5)
    one(log, "g", "t1", 1.0, version=5)
    one(log, "g", "t2", 0.0, version=4)
    one(log, "g", "t3", 9.0, version=2)
    plan = plan_of(log)
    assert plan.groups[0].scores == [1.0, 0.0]
    assert outcomes(plan)["t3"] == "stale"
    assert plan.metrics()["staleness_mean"] == 0.5


def test_a_lone_trainable_member_of_an_open_group_goes_on_waiting(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    one(log, "g", "t2", 0.0, reason="multimodal")
    plan = plan_of(log)
    assert plan.teaching == []
    assert outcomes(plan) == {"t2": "multimodal"}


def test_a_step_records_rewards_advantages_and_tokens_of_every_answer(make_log):
    log = make_log()
    one(log, "g", "t1", 1.0)
    one(log, "g", "t2", 0.0)
    (group,) = plan_of(log).groups
    assert [(u.reward, u.tokens, u.reason) for u in group.uses] == [(1.0, 1, None), (0.0, 1, None)]
    assert [round(u.advantage, 3) for u in group.uses] == [0.707, -0.707]
