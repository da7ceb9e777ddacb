"""Why something was trained on, or was not, or not yet, in words."""

import time

import pytest
from sqlalchemy import update

from gateway.store import training
from gateway.store.models import Group, Policy
from gateway.store.why import why
from tests.trainer.steps import plan_of, record, skip
from tests.trainer.tiny import Turn

PROMPT = [10, 11, 12]


def ask(log, id, now=None):
    with log.database.read() as connection:
        (found,) = why(connection, "default", id, now)
    return found


def said(log, id, now=None):
    return " ".join(ask(log, id, now).sentences)


def episode(log, name, reward=None, group="g", **turn):
    rewards = {} if reward is None else {"reward": reward}
    number = int(name[1:]) if name[1:].isdigit() else 0
    return log.add(group, name, [Turn(PROMPT, [[30 + number]], **turn)], **rewards)[0]


def test_what_a_step_used_says_which_with_what_advantage_and_against_what(make_log):
    log = make_log()
    completion = episode(log, "t0", 1.0)
    episode(log, "t1", 0.0)
    plan = plan_of(log)
    for group in plan.groups:
        for use in group.uses:
            use.ratio = 0.9
    step = record(log, plan)
    text = said(log, completion)
    assert ask(log, completion).state == "used"
    assert f"Step {step} (agent@0 → @1) trained on 1 tokens of {completion}" in text
    assert "advantage +0.5: it was worth 1, compared with 0.5" in text
    assert "weighed 0.9 on average" in text
    assert said(log, "t0") == text
    assert "Of its 2 trajectories: 2 trained on." in said(log, "g")
    assert f"Step {step} (agent@0 → @1) trained on 2 tokens of it." in said(log, "g")


def test_what_was_left_out_says_why_and_what_to_do(make_log):
    log = make_log()
    for number in range(2):
        episode(log, f"t{number}", 1.0)
    skip(log, plan_of(log))
    assert ask(log, "c1").state == "skipped"
    assert ask(log, "c1").reason == "equal_rewards"
    assert "worth the same" in said(log, "c1")
    assert ask(log, "g").reason == "equal_rewards"


@pytest.mark.parametrize("reason", ["multimodal", "side_call", "biased_sampling", "wrong_version"])
def test_what_can_never_be_trained_on_says_so_at_once(make_log, reason):
    log = make_log()
    completion = episode(log, "t0", 1.0, reason=reason)
    assert ask(log, completion).state == "skipped"
    assert reason in said(log, completion)


def test_a_missing_reward_a_quorum_and_a_deadline_are_waited_for(make_log):
    log = make_log(group_size=3, deadline_seconds=600)
    completion = episode(log, "t0")
    episode(log, "t1", 1.0)
    text = said(log, completion)
    assert ask(log, completion).state == "waiting"
    assert "It has no reward yet" in text
    assert "has 1 of the 3 rewarded members" in text
    assert "1 more wait for a reward" in text
    assert "it is taken in 10 minutes, at its deadline" in text
    assert "no reward yet" not in said(log, "t1")
    late = said(log, "t1", time.time() + 700)
    assert "Its deadline is over, so it is taken with what it has." in late


def test_a_ready_group_waits_for_others_to_make_a_step(make_log):
    log = make_log(groups_per_step=5)
    episode(log, "t0", 1.0)
    episode(log, "t1", 0.0)
    assert "waits for a trainer, and for 5 ready groups" in said(log, "g")


def test_a_group_that_settles_says_for_how_long(make_log):
    log = make_log(settle_seconds=30)
    episode(log, "t0", 1.0)
    episode(log, "t1", 0.0)
    assert "nothing was added to it for 30 s" in said(log, "t0")
    assert "nothing was added" not in said(log, "t0", time.time() + 31)


def test_a_closed_group_waits_for_no_more_members(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    log.close_group("g")
    assert "is closed, so it waits for no more members" in said(log, "t0")


def test_a_lease_and_the_step_that_runs_under_it_are_named(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    episode(log, "t1", 0.0)
    log.claim("worker-7", lease=120)
    assert "A trainer (worker-7) holds its group, and it is looked at" in said(log, "t0")
    step = training.begin_step(log.database, log.policy, "worker-7", {})
    assert f"step {step} is being taken on it" in said(log, "t0")
    assert "free again in" in said(log, "t0")
    assert "holds its group" not in said(log, "t0", time.time() + 130)


def test_a_paused_policy_says_so_and_how_to_go_on(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    with log.database.write() as connection:
        connection.execute(update(Policy).values(state="paused", state_reason="it got worse"))
    text = said(log, "t0")
    assert "The policy is paused, because it got worse" in text
    assert "strop policy resume agent" in text


def test_a_late_reward_says_that_it_waits_once_more(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    episode(log, "t1", 0.0)
    record(log, plan_of(log))
    log.reward(-1.0, trajectory_id="t0")
    text = said(log, "t0")
    assert ask(log, "t0").state == "waiting"
    assert "advantage +0.5" in text
    assert "waits once more" in text
    record(log, plan_of(log))
    assert "advantage -1" in said(log, "t0")
    assert "(revision 2 of its rewards)" in said(log, "t0")


def test_a_late_reward_that_came_too_late_says_so_beside_what_was_used(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    episode(log, "t1", 0.0)
    record(log, plan_of(log))
    log.move_head(20)
    log.reward(-1.0, trajectory_id="t0")
    skip(log, plan_of(log))
    found = ask(log, "t0")
    assert (found.state, found.reason) == ("used", "stale")
    assert "Its newest rewards were not used (stale)" in said(log, "t0")


def test_a_sub_agent_names_the_parent_whose_reward_it_shares(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    log.add("s", "sub", [Turn([20], [[40]])], parent="t0")
    assert "sub-agent of t0 without a reward of its own" in said(log, "sub")


def test_what_is_held_out_or_no_policys_says_so(make_log):
    log = make_log()
    log.add("g", "other", [Turn(PROMPT, [[30]], policy="large-model")])
    assert ask(log, "other").state == "not_trained"
    episode(log, "t0", 1.0)
    with log.database.write() as connection:
        connection.exec_driver_sql("update trajectories set split = 'eval' where id = 't0'")
    assert ask(log, "t0").state == "held_out"


def test_an_answer_of_another_model_in_an_episode_is_context(make_log):
    log = make_log()
    _, tool = log.add(
        "g", "a", [Turn(PROMPT, [[30]]), Turn(PROMPT, [[40]], policy="tool")], reward=1.0
    )
    assert ask(log, tool).state == "not_trained"
    assert "it is context" in said(log, tool)


def test_what_there_is_not_has_no_answer(make_log):
    log = make_log()
    with log.database.read() as connection:
        assert why(connection, "default", "nothing") == []
        assert why(connection, "another-project", "t0") == []


def test_wrong_settings_are_named(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    with log.database.write() as connection:
        connection.execute(update(Policy).values(settings={"groupsize": 2}))
    assert "did you mean group_size" in said(log, "t0")


def test_a_group_of_two_policies_is_explained_for_each(make_log):
    log = make_log()
    episode(log, "t0", 1.0)
    with log.database.write() as connection:
        connection.execute(
            Group.__table__.insert().values(
                project="default", policy="other", id="g", created_at=1.0, updated_at=1.0
            )
        )
    with log.database.read() as connection:
        assert [each.policy for each in why(connection, "default", "g")] == ["agent", "other"]
