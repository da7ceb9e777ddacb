"""One rule says when a group is ready: to who takes it, who lists it and who counts it."""

import itertools
from typing import Any

import pytest
from sqlalchemy import insert, select

from gateway.store import Database, census, policies, readiness
from gateway.store import claim_statements as statements
from gateway.store.models import Group, Trajectory
from gateway.store.policy_settings import Lora, PolicySettings
from gateway.store.queries import GroupSummary, groups
from gateway.store.readiness import Readiness

NOW = 10_000.0
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "small": {"group_size": 2},
    "quick": {"deadline_seconds": 60.0},
    "both": {"group_size": 2, "deadline_seconds": 60.0},
}


def summary(**values: Any) -> GroupSummary:
    known: dict[str, Any] = {
        "id": "g",
        "policy": "usual",
        "task": None,
        "state": "open",
        "trajectories": 4,
        "rewarded": 0,
        "used": 0,
        "skipped": 0,
        "reasons": {},
        "created_at": 0.0,
        "updated_at": 0.0,
        "closed_at": None,
        "waiting": 0,
        "choices": None,
        "oldest_at": NOW - 30,
    }
    return GroupSummary(**{**known, **values})


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({"waiting": 3}, "open"),
        ({"waiting": 4}, "ready"),
        ({"policy": "small", "waiting": 2}, "ready"),
        ({"closed_at": 1.0}, "ready"),
        ({"closed_at": 1.0, "oldest_at": None}, "open"),
        ({"waiting": 1, "oldest_at": NOW - 3600}, "ready"),
        ({"waiting": 0, "oldest_at": NOW - 3600}, "open"),
        ({"policy": "quick", "waiting": 1, "oldest_at": NOW - 61}, "ready"),
        ({"policy": "quick", "waiting": 1, "oldest_at": NOW - 59}, "open"),
        ({"choices": 3, "waiting": 2}, "open"),
        ({"choices": 3, "waiting": 3}, "ready"),
        ({"policy": "nobody's", "waiting": 9, "closed_at": 1.0}, "open"),
        ({"state": "claimed", "waiting": 4}, "claimed"),
        ({"state": "trained", "used": 4}, "trained"),
        ({"state": "trained", "skipped": 4}, "skipped"),
        ({"state": "held_out"}, "held_out"),
    ],
)
def test_a_group_is_ready_when_a_trainer_would_take_it(values: dict[str, Any], state: str):
    rows = [{"name": name, "settings": settings} for name, settings in SETTINGS.items()]
    (found,) = readiness.with_states([summary(**values)], rows, NOW)
    assert found.state == state


def test_who_takes_who_lists_and_who_counts_agree(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    times = (None, NOW - 7000, NOW - 100, NOW - 10)
    cases = [
        case
        for case in itertools.product(range(5), (None, 2, 5), (None, 1.0), times)
        # Of what waits the oldest began at some time.
        if case[0] == 0 or case[3] is not None
    ]
    with database.write() as connection:
        for name, settings in SETTINGS.items():
            policies.create(
                connection,
                "default",
                name,
                base_model="base",
                base_served="base",
                lora=Lora(),
                settings=PolicySettings(**settings),
                adapter_path=None,
            )
        for name in (*SETTINGS, "nobody's"):
            for number, (waiting, choices, closed, oldest) in enumerate(cases):
                connection.execute(
                    insert(Group).values(
                        project="default",
                        policy=name,
                        id=f"{name}/{number}",
                        created_at=0.0,
                        updated_at=NOW - 5,
                        waiting=waiting,
                        choices=choices,
                        closed_at=closed,
                        oldest_at=oldest,
                    )
                )
                # Something must wait, or it is over.
                connection.execute(
                    insert(Trajectory).values(
                        project="default",
                        id=f"{name}/{number}",
                        policy=name,
                        group_id=f"{name}/{number}",
                        split="train",
                        attribution="path",
                        rewarded=False,
                        state="open",
                        created_at=0.0,
                        updated_at=0.0,
                    )
                )
    with database.read() as connection:
        condition = readiness.is_ready(connection, NOW)
        counted = set(connection.execute(select(Group.id).where(condition)).scalars())
        monkeypatch.setattr(census.time, "time", lambda: NOW)
        number = census.take(connection).groups
        rows = [{"name": name, "settings": settings} for name, settings in SETTINGS.items()]
        shown = groups(connection, "default", now=NOW, limit=5000)
        listed = {g.id for g in readiness.with_states(shown, rows, NOW) if g.state == "ready"}
        taken: set[str] = set()
        for name, settings in SETTINGS.items():
            rule = Readiness.of(settings, NOW)
            values = {"of_project": "default", "of_policy": name, "now": NOW, "most": 1000}
            values |= {"size": rule.size, "began_before": rule.began_before}
            found = connection.execute(statements.READY, values).mappings().all()
            taken |= {row["id"] for row in found}
    assert counted == listed == taken
    assert 0 < len(counted) < len(SETTINGS) * len(cases)
    for name in SETTINGS:
        mine = sum(id.startswith(f"{name}/") for id in counted)
        assert number["default", name, "ready", ""] == mine
        assert number["default", name, "open", ""] == len(cases) - mine
    assert ("default", "nobody's", "ready", "") not in number
