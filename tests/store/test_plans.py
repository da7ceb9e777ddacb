"""What the hot questions read of a PostgreSQL that is full: rows by index, and few of them."""

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import ClientCursor
from sqlalchemy import event, func, select

from benchmarks import filling
from gateway.dashboard import views
from gateway.store import (
    Database,
    claims,
    deletion,
    events,
    group_view,
    listing,
    queries,
    rewards,
    withdrawals,
)
from gateway.store.ids import new_id
from gateway.store.models import Choice, Completion, Group, Reward, Trajectory
from gateway.store.why import why

PROJECT = "default"
COMPLETIONS = 30_000
LARGE = {
    *("completions", "choices", "trajectories", "groups"),
    *("rewards", "completion_uses", "events"),
}
MOST_ROWS = 400
"""Of one table in one statement. Each of the large tables has at least four times as many."""

PARAMETER = re.compile(r"%\((\w+)\)s")

Plan = dict[str, Any]


@pytest.fixture(scope="module")
def filled(postgres) -> Iterator[Database]:
    name = new_id("t")
    postgres.psql(f"CREATE DATABASE {name}")
    database = Database(postgres.get_uri(name))
    database.migrate()
    filling.fill(database, COMPLETIONS)
    with database.write() as connection:
        connection.exec_driver_sql("ANALYZE")
    yield database
    database.dispose()
    postgres.psql(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def explained(database: Database) -> Iterator[list[tuple[str, Plan]]]:
    """The statements that are sent meanwhile, each with its plans: that of these parameters, and
    that of a connection that has sent it often. Those that read are measured."""
    found: list[tuple[str, Plan]] = []

    def explain(_connection, cursor, statement, parameters, _context, _many):
        verb = statement.split(maxsplit=1)[0].upper()
        if verb not in ("SELECT", "WITH", "INSERT", "UPDATE", "DELETE"):
            return
        how = f"EXPLAIN ({'ANALYZE, TIMING OFF, ' * (verb == 'SELECT')}FORMAT JSON)"
        with cursor.connection.cursor() as own:
            own.execute(f"{how} {statement}", parameters)
            found.append((statement, own.fetchone()[0][0]["Plan"]))
        with ClientCursor(cursor.connection) as own:
            numbers: dict[str, str] = {}
            numbered = PARAMETER.sub(
                lambda match: numbers.setdefault(match[1], f"${len(numbers) + 1}"), statement
            )
            own.execute(f"PREPARE often AS {numbered}".replace("%%", "%"))
            values = f"({', '.join(f'%({name})s' for name in numbers)})" if numbers else ""
            execute = own.mogrify(f"EXECUTE often {values}", parameters)
            # PostgreSQL looks at the values five times before it may settle on one plan for all.
            for _ in range(5):
                own.execute(f"EXPLAIN {execute}")
            own.execute(f"{how} {execute}")
            found.append((statement, own.fetchone()[0][0]["Plan"]))
            own.execute("DEALLOCATE often")

    event.listen(database.engine, "before_cursor_execute", explain)
    try:
        yield found
    finally:
        event.remove(database.engine, "before_cursor_execute", explain)


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def rows_read(node: Plan) -> float:
    each = node.get("Actual Rows", 0) + sum(
        node.get(f"Rows Removed by {why}", 0) for why in ("Filter", "Index Recheck")
    )
    return each * node.get("Actual Loops", 1)


def faults(statement: str, plan: Plan) -> list[str]:
    found = []
    for node in nodes(plan):
        table = node.get("Relation Name")
        if table not in LARGE and node["Node Type"] != "Bitmap Index Scan":
            continue
        if node["Node Type"] == "Seq Scan" or rows_read(node) > MOST_ROWS:
            found.append(
                f"{node['Node Type']} of {table or node['Index Name']}, {rows_read(node):.0f} rows: "
                f"{node.get('Index Cond')} / {node.get('Filter')}\n{statement}"
            )
    return found


def chosen(connection, seed: int = 0):
    """A trajectory that was trained on, its last completion, and the keys of its thread."""
    rng = random.Random(seed)
    query = (
        select(Trajectory.id)
        .where(Trajectory.project == PROJECT, Trajectory.state == "used")
        .order_by(Trajectory.created_at)
        .offset(rng.randrange(2_000))
        .limit(1)
    )
    trajectory = connection.execute(query).scalar_one()
    turns = connection.execute(
        select(Completion.id, Choice.thread_key)
        .join(Choice, Choice.completion_id == Completion.id)
        .where(Completion.project == PROJECT, Completion.trajectory_id == trajectory)
        .order_by(Completion.id)
    ).all()
    keys = [turn.thread_key for turn in reversed(turns)]
    return trajectory, turns[-1].id, [b"of no thread", *keys]


def listed(
    chosen: listing.Filter, project: str = PROJECT, *, descending: bool = True, middle: bool = False
):
    def ask(connection) -> bool:
        after = None
        if middle:
            _, after, _ = CHOSEN
        found, _ = listing.page(
            connection, project, chosen, after=after, limit=20, descending=descending
        )
        return bool(found)

    return ask


def post(reward: Callable[[], rewards.NewReward]):
    return lambda connection: bool(rewards.post(connection, PROJECT, [reward()])[1])


CHOSEN: tuple[str, str, list[bytes]] = ("", "", [])
"""What `chosen` chose."""

ASKED: dict[str, Callable[[Any], bool]] = {
    "the newest completions": listed(listing.Filter()),
    "the oldest completions": listed(listing.Filter(), descending=False),
    "a page in the middle": listed(listing.Filter(), middle=True),
    "a page in the middle, upwards": listed(listing.Filter(), middle=True, descending=False),
    "those of a small project": listed(listing.Filter(), "small"),
    "complete ones": listed(listing.Filter(status="complete")),
    "aborted ones": listed(listing.Filter(status="aborted")),
    "ones with an error, of which there are none": lambda c: (
        not listed(listing.Filter(status="error"))(c)
    ),
    "by metadata": listed(listing.Filter(metadata={"user": "u7"})),
    "by metadata and status": listed(listing.Filter(metadata={"user": "u7"}, status="complete")),
    "by model": listed(listing.Filter(policy="agent"), middle=True),
    "by a rare model": listed(listing.Filter(policy="rare")),
    "by version": listed(listing.Filter(policy="agent", version=3)),
    "by a version that there is not": lambda c: (
        not listed(listing.Filter(policy="agent", version=99))(c)
    ),
    "by version and status": listed(listing.Filter(policy="agent", version=3, status="complete")),
    "a trajectory": lambda c: queries.trajectory(c, PROJECT, CHOSEN[0]) is not None,
    "a completion": lambda c: queries.completion(c, PROJECT, CHOSEN[1]) is not None,
    "a tail": lambda c: queries.find_tail(c, PROJECT, CHOSEN[2], None) is not None,
    "a tail in its trajectory": lambda c: (
        queries.find_tail(c, PROJECT, CHOSEN[2], CHOSEN[0]) is not None
    ),
    "no tail": lambda c: queries.find_tail(c, PROJECT, [b"a", b"b"], None) is None,
    "a place": lambda c: queries.trajectory_place(c, PROJECT, CHOSEN[0], "agent") is not None,
    "rewards of a trajectory": lambda c: bool(queries.rewards_of(c, PROJECT, CHOSEN[0], None)),
    "rewards of a completion": lambda c: queries.rewards_of(c, PROJECT, None, CHOSEN[1]) != [0],
    "a reward for a trajectory": post(lambda: rewards.NewReward(2.0, trajectory_id=CHOSEN[0])),
    "a reward for a completion": post(
        lambda: rewards.NewReward(3.0, completion_id=CHOSEN[1], idempotency_key="new")
    ),
    "a reward for a choice": post(
        lambda: rewards.NewReward(4.0, completion_id=CHOSEN[1], choice=0)
    ),
    "a withdrawal": lambda c: bool(
        withdrawals.withdraw(c, PROJECT, [c.execute(a_reward()).scalar_one()], time.time())
    ),
    "groups": lambda c: len(queries.groups(c, PROJECT, now=time.time())) == 100,
    "groups of a policy": lambda c: (
        len(queries.groups(c, PROJECT, "other", now=time.time(), limit=20)) == 20
    ),
    "older groups": lambda c: (
        len(
            queries.groups(
                c, PROJECT, now=time.time(), limit=20, before=time.time() - filling.SPAN / 2
            )
        )
        == 20
    ),
    "a group": lambda c: group_view.view(c, PROJECT, a_group(c)) is not None,
    "the newest events": lambda c: len(events.latest(c, PROJECT)) == 20,
    "the newest events of a policy": lambda c: bool(events.latest(c, PROJECT, policy="rare")),
    "events since": lambda c: bool(events.between(c, PROJECT, 100, 300)),
    "settled events": lambda c: events.settled(c, 3_600) > 3_600,
    "the last event": lambda c: events.start(c) > 0,
    "why a completion was trained on": lambda c: bool(why(c, PROJECT, CHOSEN[1])),
    "the overview": lambda c: bool(views.overview(c, PROJECT).policies),
    "the traffic of an hour": lambda c: bool(sum(views.traffic(c, PROJECT))),
    "the page of a policy": lambda c: views.policy(c, PROJECT, "agent") is not None,
    "the page of a group": lambda c: views.group(c, PROJECT, "agent", a_group(c)) is not None,
    "the page of a trajectory": lambda c: bool(views.trajectory(c, PROJECT, CHOSEN[0]).uses),
    "the newest steps": lambda c: bool(views.step_list(c, PROJECT, None, None)),
    "older steps of a policy": lambda c: bool(views.step_list(c, PROJECT, "agent", 50)),
    "the page of a step": lambda c: bool(views.step(c, PROJECT, 50).groups),
    "whether anything has changed": lambda c: bool(views.fingerprint(c, PROJECT)[0]),
    "what is old": lambda c: (
        deletion.delete_older_than(c, PROJECT, time.time() - filling.SPAN / 2, 2).trajectories == 2
    ),
    "deleting a trajectory": lambda c: bool(
        deletion.delete_trajectories(c, PROJECT, [CHOSEN[0]]).completions
    ),
}


def a_reward():
    return select(Reward.id).where(Reward.project == PROJECT, Reward.trajectory_id == CHOSEN[0])


def a_group(connection) -> str:
    query = select(Trajectory.group_id).where(
        Trajectory.project == PROJECT, Trajectory.id == CHOSEN[0]
    )
    return connection.execute(query).scalar_one()


@pytest.mark.parametrize("what", ASKED)
def test_it_reads_few_rows(filled: Database, what: str, monkeypatch):
    with filled.read() as connection:
        monkeypatch.setitem(globals(), "CHOSEN", chosen(connection))
    with filled.connect_to_write() as connection, explained(filled) as plans:
        assert ASKED[what](connection)
        connection.rollback()
    assert plans
    wrong = [fault for statement, plan in plans for fault in faults(statement, plan)]
    assert not wrong, "\n\n".join(wrong)


def test_the_fill_is_as_large_as_the_measure_is_strict(filled: Database):
    with filled.read() as connection:
        for model in (Completion, Choice, Trajectory, Group, Reward):
            rows = connection.execute(select(func.count()).select_from(model)).scalar_one()
            assert rows >= 4 * MOST_ROWS, model


def test_the_plans_of_a_connection_that_asked_often_are_among_them(filled: Database):
    with filled.read() as connection, explained(filled) as plans:
        assert queries.trajectory(connection, PROJECT, chosen(connection)[0])
    conditions = [str(node.get("Index Cond")) for _, plan in plans for node in nodes(plan)]
    assert any("$1" in condition for condition in conditions)


def test_claiming_reads_what_is_ready(filled: Database):
    policy = next(
        each
        for each in claims.trainable_policies(filled)
        if (each.project, each.name) == (PROJECT, "agent")
    )
    with explained(filled) as plans:
        found = claims.claim_groups(
            filled,
            policy,
            "trainer",
            limit=2,
            group_size=4,
            settle_seconds=2.0,
            deadline_seconds=3600.0,
            lease_seconds=60.0,
            exclusive=True,
        )
    claims.release_groups(filled, found, "trainer")
    assert [len(group.trajectories) for group in found] == [4, 4]
    wrong = [fault for statement, plan in plans for fault in faults(statement, plan)]
    assert not wrong, "\n\n".join(wrong)
