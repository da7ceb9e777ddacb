"""Returns by turn, and advantages inside a group, computed by hand."""

import pytest
import torch

from gateway.store.baselines import Running
from tests.trainer.steps import outcomes, plan_of, taught
from tests.trainer.tiny import Turn
from trainer.credit import advantages, against_running, equal_scores, returns

PROMPT = [10, 11, 12]


def worth(groups, scale="none", leave_one_out=False):
    found = advantages(groups, scale, leave_one_out)
    return [[credit.advantages for credit in group] for group in found]


def test_advantages_are_relative_to_the_group():
    assert worth([[[1.0], [0.0], [0.5], [0.5]]]) == [[(0.5,), (-0.5,), (0.0,), (0.0,)]]


def test_advantages_are_divided_by_the_groups_standard_deviation_as_in_trl():
    scores = [1.0, 0.0, 0.2, 0.9]
    (values,) = worth([[[score] for score in scores]], "group")
    tensor = torch.tensor(scores)
    expected = ((tensor - tensor.mean()) / (tensor.std() + 1e-4)).tolist()
    assert [value for (value,) in values] == pytest.approx(expected)


def test_advantages_can_be_divided_by_the_steps_standard_deviation():
    first, second = worth([[[0.0], [1.0]], [[0.0], [0.1]]], "batch")
    assert first[1][0] == pytest.approx(10 * second[1][0])
    deviation = torch.tensor([0.0, 1.0, 0.0, 0.1]).std().item()
    assert first[1][0] == pytest.approx(0.5 / (deviation + 1e-4))


def test_leaving_one_out_compares_each_with_the_mean_of_the_others():
    (values,) = advantages([[[1.0], [0.0], [0.5]]], "none", leave_one_out=True)
    assert [c.baselines[0] for c in values] == [0.25, 0.75, 0.5]
    assert [c.advantages[0] for c in values] == [0.75, -0.75, 0.0]


def test_scores_that_differ_by_rounding_only_are_equal():
    assert equal_scores([[0.1 + 0.2], [0.3]])
    assert not equal_scores([[0.3], [0.30001]])
    # Equal in sum, and not at every turn.
    assert not equal_scores([[1.0, 1.0], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("episode", "turns", "discount", "expected"),
    [
        (2.0, [None, None], 0.5, (2.0, 2.0)),
        (None, [None, None, 1.0], 1.0, (1.0, 1.0, 1.0)),
        (None, [None, None, 1.0], 0.5, (0.25, 0.5, 1.0)),
        (None, [1.0, None, 2.0], 0.5, (1.5, 1.0, 2.0)),
        (None, [1.0, None, 2.0], 0.0, (1.0, 0.0, 2.0)),
        (None, [None, 3.0, None], 1.0, (3.0, 3.0, None)),
        (1.0, [None, 3.0, None], 1.0, (4.0, 4.0, 1.0)),
    ],
)
def test_a_turns_reward_goes_to_it_and_discounted_to_those_before_it(
    episode, turns, discount, expected
):
    assert returns(episode, turns, discount) == pytest.approx(expected)


def test_turns_are_compared_turn_by_turn_and_ended_episodes_with_their_last():
    members = [(3.0, 2.0, 1.0), (1.0, 0.0)]
    ((first, second),) = worth([members])
    # Means of 3, 1; of 2, 0; of 1, 0.
    assert first == (1.0, 1.0, 0.5)
    assert second == (-1.0, -1.0)
    ((scaled, _),) = worth([members], "group")
    deviation = ((2.0 + 2.0 + 0.5) / 3) ** 0.5
    assert scaled[0] == pytest.approx(1.0 / (deviation + 1e-4))


def test_a_turn_after_the_last_reward_is_not_trained_on(make_log):
    log = make_log()
    first, second = log.add("g", "a", [Turn(PROMPT, [[30]]), Turn([*PROMPT, 30, 9], [[31]])])
    (other,) = log.add("g", "b", [Turn(PROMPT, [[32]])], reward=0.0)
    log.reward(1.0, completion_id=first)
    plan = plan_of(log)
    assert taught(plan) == {first: 0.5, other: -0.5}
    reasons = {use.completion_id: use.reason for use in plan.groups[0].uses}
    assert reasons[second] == "no_reward"


def test_the_discount_reaches_the_advantages_of_single_tokens(make_log):
    log = make_log(turn_discount=0.5)
    turns = [Turn(PROMPT, [[30]]), Turn([*PROMPT, 30, 9], [[31, 32]])]
    good, bad = log.add("g", "a", turns), log.add("g", "b", turns)
    log.reward(1.0, completion_id=good[1])
    log.reward(0.0, completion_id=bad[1])
    plan = plan_of(log)
    assert taught(plan) == {good[0]: 0.25, good[1]: 0.5, bad[0]: -0.25, bad[1]: -0.5}
    spans = [span for sample in plan.samples for span in sample.spans if span.advantage > 0]
    assert [(span.stop - span.start, span.advantage) for span in spans] == [(1, 0.25), (2, 0.5)]


def test_rewards_of_another_models_turn_count_for_the_whole_episode(make_log):
    log = make_log()
    own, tool, _ = log.add(
        "g", "a", [Turn(PROMPT, [[30]]), Turn(PROMPT, [[40]], policy="tool"), Turn(PROMPT, [[31]])]
    )
    log.reward(1.0, completion_id=tool)
    log.add("g", "b", [Turn(PROMPT, [[32]])], reward=0.0)
    plan = plan_of(log)
    assert outcomes(plan) == {"a": None, "b": None}
    assert tool not in taught(plan)
    assert taught(plan)[own] == 0.5


def test_a_compacted_history_is_one_episode_in_several_threads(make_log):
    log = make_log()
    # The second turn continues the first; the third begins anew with a summary.
    turns = [
        Turn(PROMPT, [[30]]),
        Turn([*PROMPT, 30, 9], [[31, 32]]),
        Turn([10, 55, 56], [[33]]),
        Turn([10, 55, 56, 33, 9], [[34, 35]]),
    ]
    log.add("g", "a", turns, reward=1.0)
    log.add("g", "b", [Turn(PROMPT, [[36]])], reward=0.0)
    plan = plan_of(log)
    mine = [sample for sample in plan.samples if sample.trajectory_id == "a"]
    assert [sample.trained for sample in mine] == [3, 3]
    assert {span.advantage for sample in mine for span in sample.spans} == {0.5}


def test_dropped_reasoning_is_trained_once_and_not_where_it_is_missing(make_log):
    log = make_log()
    reasoning, answer, last = [70, 71, 72], [30], [31]
    # The client echoes the answer without the reasoning before it.
    turns = [Turn(PROMPT, [[*reasoning, *answer]]), Turn([*PROMPT, *answer, 9], [last])]
    log.add("g", "a", turns, reward=1.0)
    log.add("g", "b", [Turn(PROMPT, [[36]])], reward=0.0)
    mine = [sample for sample in plan_of(log).samples if sample.trajectory_id == "a"]
    trained = [
        sample.token_ids[span.start : span.stop].tolist()
        for sample in mine
        for span in sample.spans
    ]
    assert trained == [[*reasoning, *answer], last]
    assert mine[1].token_ids.tolist() == [*PROMPT, *answer, 9, *last]


def test_a_single_is_compared_with_its_task_and_its_policy():
    policy, task = Running(0.2, 0.04, 50), Running(0.8, 0.5, 4)
    credit = against_running((1.0,), policy, task, "none")
    # Four rewards of the task weigh as much as the policy's.
    assert credit.baselines == pytest.approx((0.5,))
    assert credit.advantages == pytest.approx((0.5,))
    scaled = against_running((1.0,), policy, Running(0.0, 0.0, 0), "group")
    assert scaled.advantages == pytest.approx((0.8 / (0.2 + 1e-4),))
