"""A log to look at: episodes, rewards, versions, steps, events."""

import time

from sqlalchemy import insert, select, text, update

from gateway.store import policies
from gateway.store.models import (
    Completion,
    CompletionUse,
    Event,
    Policy,
    Step,
    Trajectory,
    Version,
)
from tests.gateway.conftest import Running

EVIL = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
ASK = [
    {"role": "system", "content": "You find files for people."},
    {"role": "user", "content": f"Where is the invoice of May? {EVIL}"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def three(strop: Running) -> list[str]:
    """Three trajectories of one group, one of two turns, with a sub-agent; ids of completions."""
    ids = []
    for number in range(3):
        headers = {"X-Strop-Group": "invoice of May", "X-Strop-Trajectory": f"run/{number}"}
        reply = await strop.client.chat.completions.create(
            model="agent", messages=ASK, max_tokens=12, extra_headers=headers, tools=TOOLS
        )
        ids.append(reply.id)
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "function": {"name": "look", "arguments": '{"in": "/tmp"}'},
            }
        ],
    }
    messages = [*ASK, answer, {"role": "tool", "tool_call_id": "c", "content": EVIL}]
    reply = await strop.client.chat.completions.create(
        model="agent",
        messages=messages,
        max_tokens=8,
        extra_headers={"X-Strop-Trajectory": "run/0"},
    )
    ids.append(reply.id)
    await strop.client.chat.completions.create(
        model="agent",
        messages=[{"role": "user", "content": "List /tmp."}],
        max_tokens=4,
        extra_headers={"X-Strop-Trajectory": "helper", "X-Strop-Parent": "run/0"},
    )
    for id, reward, comment in ((ids[0], 0.2, "slow"), (ids[0], 1.0, EVIL), (ids[1], 0.0, None)):
        body = {"completion_id": id, "reward": reward, "comment": comment}
        assert (await strop.post("/v1/rewards", body))[0] == 201
    return ids


def history(strop: Running, ids: list[str], versions: int = 6) -> None:
    """Versions with steps, as a trainer would have left them, and what they used."""
    now = time.time()
    folder = str(strop.gateway.settings.artifacts() / "default" / "agent" / "000000")
    with strop.gateway.database.write() as connection:
        for number in range(1, versions + 1):
            began = now - 600 * (versions + 1 - number)
            failed = number == versions - 1
            metrics = {
                "groups": 4,
                "groups_taught_nothing": 0.5 / number,
                "reward_mean": 0.2 + 0.1 * number,
                "reward_std": 0.31,
                "rewards": {"reward": 0.2, "style": 0.4},
                "loss": -0.01 * number,
                "kl": 0.002 * number**1.5,
                "entropy": 1.4 - 0.1 * number,
                "staleness_mean": 0.4 * number,
                "grad_norm": 0.71,
                "tokens_seen": 18_750,
                "tokens_trained": 1_204,
                "seconds_by_phase": {"load": 0.4, "forward": 6.1, "backward": 9.3, "save": 0.8},
            }
            step = connection.execute(
                insert(Step)
                .values(
                    project="default",
                    policy="agent",
                    parent_version=number - 1,
                    version=None if failed else number,
                    state="failed" if failed else "done",
                    worker="trainer-1",
                    config={},
                    metrics=None if failed else metrics,
                    error="out of memory: halve token_budget" if failed else None,
                    started_at=began,
                    finished_at=began + 17,
                )
                .returning(Step.id)
            ).scalar_one()
            if failed:
                continue
            connection.execute(
                insert(Version).values(
                    project="default",
                    policy="agent",
                    number=number,
                    parent=number - 1,
                    state="serving" if number < versions else "failed",
                    adapter_path=folder,
                    probe=None,
                    probe_result={"replicas": {"r": {"mean_difference": 8.1e-6}}}
                    if number < versions
                    else {"error": "its logprobs differ from the trainer's by 0.3 nats on average"},
                    step_id=step,
                    created_at=began + 17,
                    published_at=began + 18,
                )
            )
            kind = "published" if number < versions else "failed"
            policies.event(connection, "default", "agent", kind, number, {"why": f"@{number}"})
            used = ids[0] if number == 1 else ids[1]
            connection.execute(
                insert(CompletionUse).values(
                    step_id=step,
                    completion_id=used,
                    choice=0,
                    trajectory_id="run/0" if number == 1 else "run/1",
                    group_id="invoice of May",
                    reward=1.0,
                    advantage=0.7071 if number == 1 else None,
                    tokens=12 if number == 1 else 0,
                    reason=None if number == 1 else "equal_rewards",
                )
            )
            if number == 1:
                connection.execute(
                    update(Trajectory)
                    .where(Trajectory.id == "run/0")
                    .values(state="used", step_id=step)
                )
                connection.execute(
                    update(Trajectory)
                    .where(Trajectory.id == "run/1")
                    .values(state="skipped", reason="equal_rewards")
                )
        connection.execute(update(Policy).values(alias=versions - 2, head=versions - 2))


def many(strop: Running, like: str, trajectories: int) -> None:
    """So many further trajectories, four to a group, over six versions, most of them rewarded.

    Copies of the completion `like`, made inside SQLite.
    """
    changed = {
        "id": "printf('chatcmpl-many%027d', i)",
        "trajectory_id": "'many-' || i",
        "version": ":versions * i / :count",
        "created_at": ":now - 7200 + 7200.0 * i / :count",
        "finished_at": ":now - 7199 + 7200.0 * i / :count",
    }
    columns = [column.name for column in Completion.__table__.columns]
    copied = ", ".join(changed.get(name, f'completions."{name}"') for name in columns)
    names = ", ".join(f'"{name}"' for name in columns)
    at = changed["created_at"]
    statements = (
        "INSERT INTO groups (project, policy, id, created_at, updated_at) "
        f"SELECT 'default', 'agent', 'many-' || (i / 4), {at}, {at} FROM n WHERE i % 4 = 0",
        "INSERT INTO trajectories (project, id, policy, group_id, split, attribution, rewarded, "
        "state, reason, created_at, updated_at) SELECT 'default', 'many-' || i, 'agent', "
        "'many-' || (i / 4), iif(i % 9 = 0, 'eval', 'train'), 'header', i % 5 <> 0, "
        f"iif(i % 7 = 0, 'skipped', 'open'), iif(i % 7 = 0, 'stale', NULL), {at}, {at} FROM n",
        f"INSERT INTO completions ({names}) SELECT {copied} FROM n, completions "
        "WHERE completions.id = :like",
        "INSERT INTO rewards (id, project, trajectory_id, completion_id, name, reward, source, "
        "created_at) SELECT 'rew-many-' || i, 'default', 'many-' || i, "
        f"printf('chatcmpl-many%027d', i), 'reward', (i * 7919 % 100) / 100.0, 'api', {at} "
        "FROM n WHERE i % 5 <> 0",
    )
    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < :count - 1)"
    values = {"count": trajectories, "versions": 6, "now": time.time(), "like": like}
    with strop.gateway.database.write() as connection:
        for statement in statements:
            used = {name: value for name, value in values.items() if f":{name}" in statement}
            connection.execute(text(f"{numbers} {statement}"), {**used, "count": trajectories})


def more_steps(strop: Running, count: int) -> None:
    """So many further steps that came to nothing."""
    row = {
        "project": "default",
        "policy": "agent",
        "parent_version": 0,
        "state": "failed",
        "worker": "trainer-1",
        "config": {},
        "error": "out of memory",
    }
    now = time.time()
    with strop.gateway.database.write() as connection:
        rows = [{**row, "started_at": now + n, "finished_at": now + n} for n in range(count)]
        connection.execute(insert(Step), rows)


async def more_groups(strop: Running, count: int) -> list[str]:
    """So many further groups of one trajectory each; ids of completions."""
    ids = []
    for number in range(count):
        headers = {"X-Strop-Group": f"more {number}", "X-Strop-Trajectory": f"more/{number}"}
        reply = await strop.client.chat.completions.create(
            model="agent", messages=ASK, max_tokens=1, extra_headers=headers
        )
        ids.append(reply.id)
    return ids


def trial(strop: Running, number: int) -> None:
    """Put a version on trial, on a share that the guard leaves alone."""
    with strop.gateway.database.write() as connection:
        settings = connection.execute(select(Policy.settings)).scalar_one()
        settings = {**settings, "canary": {**settings.get("canary", {}), "share": 0.2}}
        connection.execute(update(Policy).values(settings=settings))
        connection.execute(update(Version).where(Version.number == number).values(state="trial"))
        connection.execute(update(Policy).values(canary=number, canary_since=time.time() - 300))


def happen(strop: Running, kind: str) -> None:
    with strop.gateway.database.write() as connection:
        connection.execute(
            insert(Event).values(
                project="default", policy="agent", kind=kind, version=1, detail={}, at=time.time()
            )
        )
