"""Cutting logged trajectories into samples."""

import numpy as np
import pytest

from gateway.store.policy_settings import PolicySettings
from tests.trainer.tiny import Turn
from trainer.samples import ChoiceKey, cut, samples_of

SYSTEM = [10, 11, 12]


def cut_of(log, trajectory="t", head=0, **settings):
    return cut(log.trajectory(trajectory), "agent", head, PolicySettings(**settings))


def samples(log, trajectory="t", **settings):
    pieces = cut_of(log, trajectory, **settings)
    worth = {turn.key: 1.0 for turn in pieces.turns}
    return samples_of(log.trajectory(trajectory), pieces.turns, worth)


def trained(sample):
    return [sample.token_ids[span.start : span.stop].tolist() for span in sample.spans]


def test_turns_that_repeat_the_one_before_become_one_sample(make_log):
    log = make_log()
    first, second = [*SYSTEM, 20], [*SYSTEM, 20, 30, 31, 40]
    log.add(
        "g",
        "t",
        [Turn(first, [[30, 31]]), Turn(second, [[50]]), Turn([*second, 50, 41], [[51, 52]])],
    )
    (found,) = samples(log)
    assert found.token_ids.tolist() == [*second, 50, 41, 51, 52]
    assert trained(found) == [[30, 31], [50], [51, 52]]


def test_a_rewritten_history_forks_a_new_sample(make_log):
    log = make_log()
    log.add("g", "t", [Turn([*SYSTEM, 20], [[30, 31]]), Turn([*SYSTEM, 20, 99, 40], [[50]])])
    found = samples(log)
    assert [trained(s) for s in found] == [[[30, 31]], [[50]]]


def test_a_turn_that_two_continue_is_trained_in_the_first_only(make_log):
    log = make_log()
    log.add(
        "g",
        "t",
        [
            Turn(SYSTEM, [[30]]),
            Turn([*SYSTEM, 30, 40], [[50, 51]]),
            Turn([*SYSTEM, 30, 41], [[60]]),
        ],
    )
    first, second = samples(log)
    assert trained(first) == [[30], [50, 51]]
    assert trained(second) == [[60]]
    assert second.token_ids.tolist() == [*SYSTEM, 30, 41, 60]


def test_every_sampled_token_is_trained_once_however_the_trajectory_branches(make_log):
    log = make_log()
    draw = np.random.default_rng(1)
    turns, ends = [], [SYSTEM]
    for token in range(30, 90, 2):
        prompt = [*ends[draw.integers(len(ends))], token]
        turns.append(Turn(prompt, [[token + 100, token + 101]]))
        ends.append([*prompt, token + 100, token + 101])
    log.add("g", "t", turns)
    tokens = [t for s in samples(log) for part in trained(s) for t in part]
    assert sorted(tokens) == sorted(t for turn in turns for t in turn.answers[0])


def test_each_choice_of_the_last_completion_is_a_sample_of_its_own(make_log):
    log = make_log()
    log.add("g", "t", [Turn(SYSTEM, [[30]]), Turn([*SYSTEM, 30, 40], [[50], [51], [52]])])
    found = samples(log)
    assert [trained(s) for s in found] == [[[30], [50]], [[51]], [[52]]]


def test_the_logged_logprobs_and_versions_go_with_their_tokens(make_log):
    log = make_log()
    (name,) = log.add("g", "t", [Turn(SYSTEM, [[30, 31]], [[-0.5, -1.5]], version=3)])
    (found,) = samples(log, head=4)
    assert found.spans[0].logprobs == [-0.5, -1.5]
    assert found.spans[0].version == 3
    assert found.spans[0].key == ChoiceKey(name, 0)


def test_completions_of_other_models_are_no_part_of_a_sample(make_log):
    log = make_log()
    log.add("g", "t", [Turn(SYSTEM, [[30]]), Turn(SYSTEM, [[31]], policy="judge")])
    pieces = cut_of(log)
    assert len(pieces.turns) == 1
    assert pieces.left_out == []


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (Turn([], [[30]]), "no_token_ids"),
        (Turn(SYSTEM, [[]]), "no_token_ids"),
        (Turn(SYSTEM, [[30, 31]], [[-1.0]]), "no_token_ids"),
        (Turn(SYSTEM, [[30]], [[float("nan")]]), "no_token_ids"),
        (Turn(SYSTEM, [], status="error"), "aborted"),
        (Turn(SYSTEM, [[30]], version=None), "wrong_version"),
        (Turn(SYSTEM, [[30]], version=1), "stale"),
        (Turn(SYSTEM, [[30] * 30], version=10), "too_long"),
        (Turn(SYSTEM, [[30]], version=10, reason="biased_sampling"), "biased_sampling"),
        (Turn(SYSTEM, [[30]], version=10, reason="multimodal"), "multimodal"),
        (Turn(SYSTEM, [[30]], version=10, reason="aborted"), "aborted"),
        (Turn(SYSTEM, [[30]], version=10, sampling={"temperature": 0}), "biased_sampling"),
    ],
)
def test_what_cannot_be_trained_on_carries_its_reason(make_log, turn, reason):
    log = make_log()
    log.add("g", "t", [turn])
    pieces = cut_of(log, head=10, max_tokens=20)
    assert pieces.turns == []
    assert pieces.reason == reason


def test_a_turn_that_cannot_be_trained_on_is_context_for_the_next(make_log):
    log = make_log()
    log.add(
        "g",
        "t",
        [
            Turn(SYSTEM, [[30]]),
            Turn([*SYSTEM, 30, 40], [[50]], reason="biased_sampling"),
            Turn([*SYSTEM, 30, 40, 50, 41], [[60]]),
        ],
    )
    (found,) = samples(log)
    assert trained(found) == [[30], [60]]
    assert found.token_ids.tolist() == [*SYSTEM, 30, 40, 50, 41, 60]
    assert cut_of(log).reason is None


def test_biased_samples_are_trained_on_where_the_policy_says_so(make_log):
    log = make_log()
    log.add("g", "t", [Turn(SYSTEM, [[30]], reason="biased_sampling")])
    assert cut_of(log, train_biased=True).reason is None


def test_a_version_rolled_back_from_counts_as_far_away_as_an_old_one(make_log):
    log = make_log()
    log.add("g", "t", [Turn(SYSTEM, [[30]], version=12)])
    assert cut_of(log, head=3).reason == "stale"
    assert cut_of(log, head=4).reason is None


def test_nothing_after_the_last_trained_token_is_kept(make_log):
    log = make_log()
    log.add("g", "t", [Turn(SYSTEM, [[30]]), Turn([*SYSTEM, 30, 40], [[50]])])
    pieces = cut_of(log)
    (found,) = samples_of(log.trajectory("t"), pieces.turns, {pieces.turns[0].key: 1.0})
    assert found.token_ids.tolist() == [*SYSTEM, 30]
