"""`POST /v1/groups/{id}/close`: what a trainer finds to claim after it."""

from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import select

from gateway.store import keys, training
from gateway.store.claims import ClaimedGroup, TrainablePolicy, claim_groups
from gateway.store.models import Completion, Trajectory
from tests.gateway.conftest import Running

ASK = {"model": "agent", "messages": [{"role": "user", "content": "Which file?"}], "max_tokens": 3}


async def episode(strop: Running, reward: float | None = None, **headers: str) -> str:
    """One completion that is a trajectory of its own, with a reward if one is given; its group."""
    status, reply = await strop.post("/v1/chat/completions", ASK, **headers)
    assert status == 200, reply
    if reward is not None:
        posted = {"completion_id": reply["id"], "reward": reward}
        assert (await strop.post("/v1/rewards", posted, **headers))[0] == 201
    with strop.gateway.database.read() as connection:
        of = select(Trajectory.group_id).join(
            Completion,
            (Completion.project == Trajectory.project)
            & (Completion.trajectory_id == Trajectory.id),
        )
        return connection.execute(of.where(Completion.id == reply["id"])).scalar_one()


def claim(strop: Running, worker: str = "w", project: str = "default") -> list[ClaimedGroup]:
    """What a trainer that wants four of a group can take now."""
    policy = TrainablePolicy(project, "agent", "base", 0, None, {}, {})
    return claim_groups(
        strop.gateway.database,
        policy,
        worker,
        limit=9,
        group_size=4,
        settle_seconds=0,
        deadline_seconds=1e9,
        lease_seconds=60,
    )


def decide(strop: Running, claimed: list[ClaimedGroup], worker: str = "w") -> None:
    """Leave out whatever was claimed, as a trainer does of one that stands alone."""
    outcomes = [
        training.Outcome(t.id, "too_few" if t.rewards else "no_reward")
        for group in claimed
        for t in group.trajectories
    ]
    training.skip_groups(strop.gateway.database, claimed, worker, outcomes, [])


async def close(strop: Running, group: str, query: str = "", **headers: str) -> tuple[int, Any]:
    return await strop.post(f"/v1/groups/{quote(group, safe='')}/close{query}", {}, **headers)


@pytest.mark.parametrize("given", [{"X-Strop-Group": "night/run 7"}, {}], ids=["explicit", "task"])
async def test_a_closed_group_is_ready_with_what_it_has(strop: Running, given: dict[str, str]):
    groups = {await episode(strop, reward, **given) for reward in (0.0, 1.0, None)}
    (group,) = groups
    assert group == given.get("X-Strop-Group", group)
    assert claim(strop) == []
    assert await close(strop, group) == (200, {"object": "group", "id": group, "closed": True})
    (claimed,) = claim(strop)
    assert (claimed.id, claimed.final) == (group, True)
    assert sorted(len(t.rewards) for t in claimed.trajectories) == [0, 1, 1]


async def test_closing_twice_changes_nothing(strop: Running):
    await episode(strop, 1.0, **{"X-Strop-Group": "g"})
    answers = [await close(strop, "g")]
    (before,) = (await strop.get("/v1/groups"))[1]["data"]
    answers.append(await close(strop, "g"))
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0] == answers[1]
    assert (await strop.get("/v1/groups"))[1]["data"] == [before]
    assert len(claim(strop)) == 1
    # Nor does it take the group from the trainer that has it.
    assert (await close(strop, "g"))[0] == 200
    assert claim(strop, "another") == []


async def test_a_group_that_is_not_there_is_not_closed(strop: Running):
    await episode(strop, 1.0, **{"X-Strop-Group": "g"})
    for group in ("nobody", "g/", "G", "%"):
        status, answer = await close(strop, group)
        assert (status, answer["error"]["code"]) == (404, "group_not_found"), group
    status, answer = await close(strop, "g", "?policy=another")
    assert status == 404
    assert claim(strop) == []
    # And a group of that name that comes later is open.
    await episode(strop, 1.0, **{"X-Strop-Group": "nobody"})
    assert claim(strop) == []


async def test_a_project_closes_its_own_group_of_a_name(strop: Running):
    headers = {}
    for project in ("ours", "theirs"):
        with strop.gateway.database.write() as connection:
            key = keys.create(connection, project, "test", ["admin"])[1]
        headers[project] = {"authorization": f"Bearer {key}"}
    for ours in headers.values():
        assert (await strop.post("/v1/policies", {"name": "agent"}, **ours))[0] == 201
    await episode(strop, 1.0, **headers["ours"], **{"X-Strop-Group": "ours"})
    assert (await close(strop, "ours", **headers["theirs"]))[0] == 404
    for ours in headers.values():
        await episode(strop, 1.0, **ours, **{"X-Strop-Group": "same"})
    assert (await close(strop, "same", **headers["theirs"]))[0] == 200
    assert claim(strop, project="ours") == []
    assert [group.id for group in claim(strop, project="theirs")] == ["same"]


async def test_of_two_policies_with_groups_of_a_name_one_can_be_closed(strop: Running):
    assert (await strop.post("/v1/policies", {"name": "other"}))[0] == 201
    ask = {**ASK, "model": "other"}
    headers = {"X-Strop-Group": "same", "X-Strop-Trajectory": "t"}
    _, reply = await strop.post("/v1/chat/completions", ask, **headers)
    await strop.post("/v1/rewards", {"completion_id": reply["id"], "reward": 1})
    await episode(strop, 1.0, **{"X-Strop-Group": "same"})
    assert (await close(strop, "same", "?policy=other"))[0] == 200
    assert claim(strop) == []
    assert (await close(strop, "same"))[0] == 200
    assert [group.policy for group in claim(strop)] == ["agent"]


async def test_what_comes_after_the_close_is_taken_as_it_comes(strop: Running):
    given = {"X-Strop-Group": "g"}
    await episode(strop, 1.0, **given)
    await close(strop, "g")
    claimed = claim(strop)
    decide(strop, claimed)
    assert claim(strop) == []
    # One with a reward at once; one without, whose reward makes a revision of it.
    await episode(strop, 0.5, **given)
    (late,) = claim(strop)
    assert ([len(t.rewards) for t in late.trajectories], late.final) == ([1], True)
    decide(strop, [late])
    name = {**given, "X-Strop-Trajectory": "slow"}
    await episode(strop, **name)
    (slow,) = claim(strop)
    assert [(t.id, t.rewards) for t in slow.trajectories] == [("slow", [])]
    decide(strop, [slow])
    assert claim(strop) == []
    assert (await strop.post("/v1/rewards", {"trajectory_id": "slow", "reward": 1}))[0] == 201
    (revised,) = claim(strop)
    assert [t.id for t in revised.trajectories] == ["slow"]
    assert len(revised.relatives.peers) == 2
