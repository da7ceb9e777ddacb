"""Sub-agents share the reward of the trajectory that started them, unless they have their own."""

from tests.trainer.steps import outcomes, plan_of, record, taught
from tests.trainer.tiny import Turn

PROMPT = [10, 11, 12]
SUB = [20, 21]


def family(log, parent, reward=None, group="g", own=None, policy="agent"):
    """A parent of two turns with a sub-agent between them; returns their completions."""
    rewards = {} if reward is None else {"reward": reward}
    first = log.add(group, parent, [Turn(PROMPT, [[30]], policy=policy)])
    scored = {} if own is None else {"reward": own}
    child = log.add(f"{group}-sub", f"{parent}-sub", [Turn(SUB, [[40]])], parent=parent, **scored)
    last = log.add(group, parent, [Turn([*PROMPT, 30, 9], [[31]], policy=policy)], **rewards)
    return [*first, *child, *last]


def test_a_sub_agent_gets_its_parents_advantage_in_its_parents_group(make_log):
    log = make_log()
    good, bad = family(log, "a", 1.0), family(log, "b", 0.0)
    plan = plan_of(log)
    assert [group.claimed.id for group in plan.groups] == ["g"]
    assert taught(plan) == {**dict.fromkeys(good, 0.5), **dict.fromkeys(bad, -0.5)}
    assert {use.trajectory_id for use in plan.groups[0].uses} == {"a", "a-sub", "b", "b-sub"}
    # One trajectory in the loss, however many threads it has.
    assert {sample.trajectory_id for sample in plan.samples} == {"a", "b"}
    record(log, plan)
    assert set(log.states().values()) == {("used", None)}
    assert plan_of(log).groups == []


def test_sub_agents_of_sub_agents_belong_to_it_too(make_log):
    log = make_log()
    family(log, "a", 1.0)
    log.add("deep", "a-deep", [Turn(SUB, [[41]])], parent="a-sub")
    family(log, "b", 0.0)
    assert outcomes(plan_of(log))["a-deep"] is None


def test_a_sub_agent_with_a_reward_of_its_own_is_compared_in_its_own_group(make_log):
    log = make_log()
    good, bad = family(log, "a", 1.0, own=3.0), family(log, "b", 0.0, own=5.0)
    found = taught(plan_of(log))
    assert (found[good[0]], found[good[1]], found[good[2]]) == (0.5, -1.0, 0.5)
    assert (found[bad[0]], found[bad[1]], found[bad[2]]) == (-0.5, 1.0, -0.5)


def test_a_reward_of_a_turn_reaches_the_sub_agents_that_were_asked_before_it(make_log):
    log = make_log(turn_discount=0.5)
    good, bad = family(log, "a"), family(log, "b", 0.0)
    log.reward(1.0, completion_id=good[2])
    found = taught(plan_of(log))
    assert [found[name] for name in good] == [0.125, 0.25, 0.5]
    assert [found[name] for name in bad] == [-0.125, -0.25, -0.5]


def test_a_sub_agent_waits_as_long_as_its_parent_does(make_log):
    log = make_log()
    family(log, "a")
    family(log, "b")
    log.close_group("g-sub")
    assert plan_of(log).groups == []
    log.close_group("g")
    assert outcomes(plan_of(log)) == dict.fromkeys(["a", "a-sub", "b", "b-sub"], "no_reward")


def test_a_sub_agent_of_another_model_is_lent_that_ones_reward(make_log):
    log = make_log()
    good = family(log, "a", 1.0, policy="large-model")
    bad = family(log, "b", 0.0, policy="large-model")
    plan = plan_of(log)
    assert [group.claimed.id for group in plan.groups] == ["g-sub"]
    assert taught(plan) == {good[1]: 0.5, bad[1]: -0.5}
    record(log, plan)
    log.reward(-1.0, trajectory_id="a")
    # Taught 0.5; between -1 and 0 it should have been -0.5.
    assert taught(plan_of(log)) == {good[1]: -1.0}


def test_a_correction_of_the_parents_reward_reaches_its_sub_agents(make_log):
    log = make_log()
    good = family(log, "a", 1.0)
    family(log, "b", 0.0)
    record(log, plan_of(log))
    log.reward(-1.0, trajectory_id="a")
    plan = plan_of(log)
    assert taught(plan) == dict.fromkeys(good, -1.0)
    record(log, plan)
    assert plan_of(log).groups == []


def test_a_sub_agent_that_cannot_be_trained_on_says_why(make_log):
    log = make_log()
    log.add("g", "a", [Turn(PROMPT, [[30]])], reward=1.0)
    log.add("s", "a-sub", [Turn(SUB, [[40]], reason="multimodal")], parent="a")
    log.add("g", "b", [Turn(PROMPT, [[31]])], reward=0.0)
    assert outcomes(plan_of(log)) == {"a": None, "a-sub": "multimodal", "b": None}
