"""A PostgreSQL full of completions, as a year of use would leave it, in minutes.

A few trajectories are stored as the gateway stores them; the server then multiplies them, with
ids, times, threads and states of their own. So shapes and sizes are real, and what is repeated is
only the text. Of `SHARE_WAITING` of the groups, the newest, half are ready for the trainer.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import Connection, Table

from benchmarks.storage import ids, text
from gateway.store import Database, policies
from gateway.store.models import (
    Choice,
    Completion,
    CompletionUse,
    Event,
    Group,
    Reward,
    Step,
    Trajectory,
)
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.records import CapturedChoice, CapturedCompletion, TrajectoryRef
from gateway.store.rows import EncodedCompletion, encode
from gateway.store.statements import Statements

TURNS = 4
MEMBERS = 4
"""Trajectories of a group."""
TEMPLATES = 8
SHARE_WAITING = 0.03
POLICIES = ("agent", "other", "rare")
"""Nine tenths, one tenth, and one group in a thousand."""
PROJECTS = ("default", "small")
"""The second has 2% of the groups."""
USERS = 2_000
"""Different values of the metadata key `user`."""
BASE_MODEL = "example/base"
SPAN = 30 * 86_400.0
"""Seconds between the first completion and the last."""

_BATCH = 5_000
"""Trajectories of one transaction."""

_FUNCTIONS = """
CREATE FUNCTION pg_temp.completion_id(t bigint, turn int, at double precision) RETURNS text AS $$
  SELECT 'chatcmpl-' || lpad(to_hex((at * 1000)::bigint + turn), 12, '0')
    || substr(md5(t || '-' || turn), 1, 20)
$$ LANGUAGE sql IMMUTABLE;
CREATE FUNCTION pg_temp.trajectory_id(t bigint) RETURNS text AS $$
  SELECT 'traj-' || md5('trajectory' || t)
$$ LANGUAGE sql IMMUTABLE;
"""

_MADE = """
CREATE TEMP TABLE made ON COMMIT DROP AS
SELECT *,
  CASE WHEN g % 50 = 3 THEN 'small' ELSE 'default' END AS project,
  CASE WHEN g % 1000 = 501 THEN 'rare' WHEN g % 10 = 0 THEN 'other' ELSE 'agent' END AS policy,
  'group-' || md5('group' || g) AS group_id,
  CASE WHEN g % 20 = 7 THEN 'eval' ELSE 'train' END AS split,
  CASE WHEN waits OR g % 20 = 7 THEN 'open' WHEN g % 10 = 4 THEN 'skipped' ELSE 'used' END AS state,
  NOT waits OR g % 2 = 0 OR t % {members} < {members} / 2 AS rewarded,
  g / 8 + 1 AS step_id,
  (t * 20 / {trajectories})::int AS version
FROM (
  SELECT t, pg_temp.trajectory_id(t) AS id, t / {members} AS g, t % {templates} AS template,
    {began} + t * {apart} AS at,
    t / {members} >= (1 - {share}) * {trajectories} / {members} AS waits
  FROM generate_series({first}::bigint, {last}::bigint) AS t
) AS numbered
"""

_ROWS: dict[type, tuple[str, dict[str, str]]] = {
    Trajectory: (
        "made",
        {
            **{
                name: f"made.{name}"
                for name in ("project", "id", "policy", "group_id", "split", "state", "rewarded")
            },
            "attribution": "'continuation'",
            "reason": "CASE WHEN state = 'skipped' THEN 'equal_rewards' END",
            "step_id": "CASE WHEN state = 'used' THEN step_id END",
            "revision": "rewarded::int",
            "settled_revision": "CASE WHEN state <> 'open' THEN 1 END",
            "created_at": "at",
            "updated_at": f"at + {TURNS}",
        },
    ),
    Group: (
        "(SELECT g, project, policy, group_id, min(at) AS at, bool_and(waits) AS waits, "
        "bool_and(split = 'train') AS trained, count(*) FILTER (WHERE rewarded) AS rewarded "
        "FROM made GROUP BY 1, 2, 3, 4) AS made",
        {
            "project": "project",
            "policy": "policy",
            "id": "group_id",
            "task": "'task ' || g % 500",
            "created_at": "at",
            "updated_at": f"at + {TURNS}",
            "waiting": "CASE WHEN waits AND trained THEN rewarded ELSE 0 END",
            "oldest_at": "CASE WHEN waits AND trained THEN at END",
            "strikes": "0",
        },
    ),
    Completion: (
        "made JOIN template_completions AS c ON c.trajectory_id = 'template-' || template "
        "CROSS JOIN LATERAL (SELECT c.created_at::int AS turn) AS n",
        {
            "id": "pg_temp.completion_id(t, turn, at + turn)",
            "project": "made.project",
            "trajectory_id": "made.id",
            "parent_id": "CASE WHEN turn > 0 "
            "THEN pg_temp.completion_id(t, turn - 1, at + turn - 1) END",
            "policy": "made.policy",
            "version": "made.version",
            "served_model": "made.policy || '@' || made.version",
            "status": "CASE WHEN g % 100 = 9 AND turn = 3 THEN 'aborted' ELSE 'complete' END",
            "client_metadata": f"jsonb_build_object('user', 'u' || t % {USERS})",
            "created_at": "at + turn",
            "finished_at": "at + turn + 0.9",
        },
    ),
    Choice: (
        "made JOIN template_choices AS c ON c.trajectory_id = 'template-' || template",
        {
            "completion_id": "pg_temp.completion_id(t, turn, at + turn)",
            "sequence_digest": "substr(sha256(c.sequence_digest || int8send(t)), 1, 16)",
            "thread_key": "substr(sha256(c.thread_key || int8send(t)), 1, 16)",
            "continued": f"turn < {TURNS - 1}",
        },
    ),
    Reward: (
        "made WHERE rewarded",
        {
            "id": "'reward-' || md5('reward' || t)",
            "project": "project",
            "trajectory_id": "id",
            "completion_id": "CASE WHEN t % 2 = 0 "
            f"THEN pg_temp.completion_id(t, {TURNS - 1}, at + {TURNS - 1}) END",
            "name": "'reward'",
            "reward": "(t % 5) / 4.0",
            "source": "'api'",
            "idempotency_key": "'key-' || t",
            "created_at": f"at + {TURNS}",
        },
    ),
    CompletionUse: (
        f"made CROSS JOIN generate_series(0, {TURNS - 1}) AS turn "
        "WHERE state <> 'open' AND split = 'train'",
        {
            "step_id": "CASE WHEN state = 'used' THEN step_id END",
            "completion_id": "pg_temp.completion_id(t, turn, at + turn)",
            "choice": "0",
            "trajectory_id": "id",
            "group_id": "group_id",
            "reward": "(t % 5) / 4.0",
            "advantage": "CASE WHEN state = 'used' THEN (t % 5) / 4.0 - 0.5 END",
            "tokens": "CASE WHEN state = 'used' THEN 100 ELSE 0 END",
            "reason": "CASE WHEN state = 'skipped' THEN 'equal_rewards' END",
            "revision": "1",
        },
    ),
    Step: (
        f"(SELECT step_id, min(at) AS at FROM made WHERE t % {8 * MEMBERS} = 0 GROUP BY 1) AS s",
        {
            "id": "step_id",
            "project": "'default'",
            "policy": "'agent'",
            "parent_version": "0",
            "state": "'done'",
            "worker": "'trainer'",
            "config": "'{}'",
            "started_at": "at",
            "finished_at": "at + 20",
        },
    ),
    Event: (
        "made WHERE t % 2 = 0",
        {
            "project": "project",
            "policy": "policy",
            "kind": "'published'",
            "version": "version",
            "detail": "'{}'",
            "at": "at",
        },
    ),
}
"""For each table what its rows are made of; columns that are not named are the template's."""


def fill(
    database: Database, completions: int, told: Callable[[int, float], None] = lambda *_: None
) -> int:
    """Fill an empty PostgreSQL with about so many completions; returns how many there are.

    Args:
        told: called after each batch with the completions so far and the seconds taken; what it
            raises ends the filling.
    """
    trajectories = max(completions // TURNS // MEMBERS, 1) * MEMBERS
    started = time.monotonic()
    values = {
        "members": MEMBERS,
        "templates": TEMPLATES,
        "trajectories": trajectories,
        "share": SHARE_WAITING,
        "began": time.time() - SPAN,
        # The last of them is over for a while, so that what waits has settled.
        "apart": (SPAN - 600.0) / trajectories,
    }
    with database.write() as connection:
        for project in PROJECTS:
            for name in POLICIES:
                policies.create(
                    connection,
                    project,
                    name,
                    base_model=BASE_MODEL,
                    base_served="base",
                    lora=Lora(),
                    settings=PolicySettings(),
                    adapter_path=None,
                )
    with database.connect_to_write() as connection:
        with connection.begin():
            _templates(connection)
            connection.exec_driver_sql(_FUNCTIONS)
        for first in range(0, trajectories, _BATCH):
            last = min(first + _BATCH, trajectories) - 1
            with connection.begin():
                # What is made here refers only to what is made here.
                connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
                connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                _run(connection, _MADE.format(**values, first=first, last=last))
                for model in _ROWS:
                    _run(connection, _insert(model))
            told((last + 1) * TURNS, time.monotonic() - started)
        connection.detach()
    return trajectories * TURNS


def _run(connection: Connection, statement: str) -> None:
    # The driver would take a single one for a placeholder.
    connection.exec_driver_sql(statement.replace("%", "%%"))


def _insert(model: type) -> str:
    source, known = _ROWS[model]
    table: Table = model.__table__  # type: ignore[attr-defined]
    columns = dict(known)
    if model in (Completion, Choice):
        columns |= {c.name: f'c."{c.name}"' for c in table.c if c.name not in known}
    names = ", ".join(f'"{name}"' for name in columns)
    return f"INSERT INTO {table.name} ({names}) SELECT {', '.join(columns.values())} FROM {source}"


def _templates(connection: Connection) -> None:
    Statements(is_sqlite=False).insert(
        connection, [item for number in range(TEMPLATES) for item in _template(number)]
    )
    connection.exec_driver_sql(
        "CREATE TEMP TABLE template_completions AS SELECT * FROM completions"
    )
    connection.exec_driver_sql(
        "CREATE TEMP TABLE template_choices AS SELECT choices.*, c.trajectory_id, "
        "c.created_at::int AS turn FROM choices JOIN completions AS c ON c.id = completion_id"
    )
    for model in (Trajectory, Group):
        connection.exec_driver_sql(f"DELETE FROM {model.__tablename__}")


def _template(number: int) -> list[EncodedCompletion]:
    """A trajectory of about 5 KB of text, each turn of which stores what is new in it."""
    rng = random.Random(number)
    messages = [{"role": "system", "content": text(rng, 1_200)}]
    prompt = ids(rng, 1_200)
    found: list[EncodedCompletion] = []
    tail = None
    for turn in range(TURNS):
        messages = [*messages, {"role": "user", "content": text(rng, 500)}]
        prompt = [*prompt, *ids(rng, 500)]
        answer, key = ids(rng, 400), rng.randbytes(16)
        message = {"role": "assistant", "content": text(rng, 400)}
        id = f"template-{number}-{turn}"
        item = encode(
            CapturedCompletion(
                id=id,
                project="template",
                trajectory=TrajectoryRef(f"template-{number}", "template", "continuation"),
                policy="agent",
                version=0,
                trained=True,
                messages=messages,
                request={"model": "agent", "temperature": 1.0, "max_tokens": 256},
                stream=False,
                created_at=float(turn),
                finished_at=float(turn),
                first_token_at=None,
                tail=tail,
                sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1},
                replica="http://127.0.0.1:8001",
                response={
                    "id": id,
                    "object": "chat.completion",
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(answer)},
                },
                prompt_ids=prompt,
                prompt_tokens=len(prompt),
                completion_tokens=len(answer),
                choices=[
                    CapturedChoice(0, "stop", answer, [-rng.expovariate(1.0) for _ in answer], key)
                ],
            )
        )
        found.append(replace(item, captured=None))
        tail = item.tails[key]
        messages = [*messages, message]
        prompt = [*prompt, *answer]
    return found
