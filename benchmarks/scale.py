"""What questions and pages take when PostgreSQL holds a million completions.

    python -m benchmarks.scale [--completions 1000000] [--rounds 40] [--keep DIR] [--json FILE]

The database is filled by `benchmarks.filling`; with `--keep` it stays in a folder and is used
again. Questions are asked in this process as the gateway and the trainer ask them, pages of a
gateway of its own over HTTP; each round asks each of them once, for rows drawn at random. Rewards
are committed; claimed groups are held to the end, so that each claim finds another one.
"""

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, func, insert, select, text, update

from benchmarks import filling
from benchmarks.gateway.servers import postgresql, started, upstream
from gateway.backends.launch import free_port
from gateway.store import Database, claims, listing, queries, rewards
from gateway.store.models import Choice, Completion, Group, Step, Trajectory, Version

PROJECT = "default"
POLICY = "agent"
VERSIONS = 19
"""Beyond version 0."""
WORKER = "benchmark"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows to ask for."""

    trajectory: str
    group: str
    began: float
    completion: str
    """The last one of the trajectory."""
    metadata: dict[str, str]
    threads: list[bytes]
    """What a next turn's beginnings are looked up by, the longest first."""
    step: int


def choose(database: Database, count: int, seed: int = 0) -> list[Chosen]:
    """Trained trajectories from all over the table, each with what belongs to it."""
    rng = random.Random(seed)
    found = []
    with database.read() as connection:
        oldest, newest = connection.execute(
            select(func.min(Trajectory.created_at), func.max(Trajectory.created_at)).where(
                Trajectory.project == PROJECT
            )
        ).one()
        for _ in range(count):
            # The newest few wait for the trainer.
            at = oldest + rng.random() * (1 - filling.SHARE_WAITING) * (newest - oldest)
            row = connection.execute(
                select(Trajectory)
                .where(
                    Trajectory.project == PROJECT,
                    Trajectory.created_at <= at,
                    Trajectory.policy == POLICY,
                    Trajectory.step_id.is_not(None),
                )
                .with_only_columns(
                    Trajectory.id, Trajectory.group_id, Trajectory.created_at, Trajectory.step_id
                )
                .order_by(Trajectory.created_at.desc())
                .limit(1)
            ).one()
            turns = connection.execute(
                select(Completion.id, Completion.client_metadata, Choice.thread_key)
                .join(Choice, Choice.completion_id == Completion.id)
                .where(Completion.project == PROJECT, Completion.trajectory_id == row.id)
                .order_by(Completion.created_at.desc())
            ).all()
            found.append(
                Chosen(
                    row.id,
                    row.group_id,
                    row.created_at,
                    turns[0].id,
                    turns[0].client_metadata,
                    [rng.randbytes(16), *(turn.thread_key for turn in turns)],
                    row.step_id,
                )
            )
    return found


def history(database: Database) -> None:
    """Versions of each policy, and numbers of the steps, as a trainer would have left them."""
    now = time.time()
    metrics = {
        "kl": 0.02,
        "staleness_mean": 0.4,
        "groups_taught_nothing": 0.2,
        "entropy": 1.1,
        "reward_mean": 0.5,
        "seconds_by_phase": {"claim": 0.1, "forward": 6.0, "backward": 9.0, "save": 0.4},
    }
    with database.write() as connection:
        known = select(func.count()).select_from(Version).where(Version.number > 0)
        if connection.execute(known).scalar_one():
            return
        connection.execute(
            insert(Version),
            [
                {
                    "project": project,
                    "policy": policy,
                    "number": number,
                    "parent": number - 1,
                    # None that a gateway would have to load.
                    "state": "retired",
                    "adapter_path": f"/adapters/{policy}/{number}",
                    "created_at": now - filling.SPAN * (1 - number / (VERSIONS + 1)),
                    "published_at": now - filling.SPAN * (1 - number / (VERSIONS + 1)),
                }
                for project in filling.PROJECTS
                for policy in filling.POLICIES
                for number in range(1, VERSIONS + 1)
            ],
        )
        made = func.floor((Step.started_at - (now - filling.SPAN)) / filling.SPAN * VERSIONS) + 1
        connection.execute(update(Step).values(metrics=metrics, version=made))
    with database.connect_to_write() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM ANALYZE"))


Question = Callable[[], Any]


def reading(database: Database, row: Chosen) -> dict[str, Question]:
    """The questions that change nothing."""

    def read(ask: Callable[[Connection], Any]) -> Question:
        def question() -> Any:
            with database.read() as connection:
                return ask(connection)

        return question

    def page(chosen: listing.Filter, after: str | None = None) -> Question:
        return read(
            lambda c: listing.page(c, PROJECT, chosen, after=after, limit=20, descending=True)[0]
        )

    return {
        "listing: the newest": page(listing.Filter()),
        "listing: a page in the middle": page(listing.Filter(), row.completion),
        "listing: by model": page(listing.Filter(policy=POLICY), row.completion),
        "listing: by metadata": page(listing.Filter(metadata=row.metadata)),
        "reading a trajectory": read(lambda c: queries.trajectory(c, PROJECT, row.trajectory)),
        "finding what a request continues": read(
            lambda c: queries.find_tail(c, PROJECT, row.threads, None)
        ),
        "listing 40 groups": read(
            lambda c: queries.groups(c, PROJECT, now=time.time(), limit=40, before=row.began)
        ),
    }


def changing(
    database: Database, row: Chosen, policy: claims.TrainablePolicy, held: list[claims.ClaimedGroup]
) -> dict[str, Question]:
    """Those that are committed."""

    def post() -> Any:
        with database.write() as connection:
            reward = rewards.NewReward(random.random(), trajectory_id=row.trajectory)
            return rewards.post(connection, PROJECT, [reward])

    def claim() -> list[claims.ClaimedGroup]:
        found = claims.claim_groups(
            database,
            policy,
            WORKER,
            limit=1,
            group_size=filling.MEMBERS,
            settle_seconds=2.0,
            deadline_seconds=3_600.0,
            lease_seconds=600.0,
        )
        held.extend(found)
        return found

    return {"posting a reward": post, "claiming a group": claim}


def asked(database: Database, rows: list[Chosen]) -> Iterator[tuple[str, float]]:
    """Each question with the milliseconds it took, round by round, for each of the rows."""
    policy = next(
        each
        for each in claims.trainable_policies(database)
        if (each.project, each.name) == (PROJECT, POLICY)
    )
    held: list[claims.ClaimedGroup] = []
    try:
        for row in rows:
            questions = reading(database, row) | changing(database, row, policy, held)
            for name, question in questions.items():
                began = time.perf_counter()
                answer = question()
                took = 1e3 * (time.perf_counter() - began)
                if not answer:
                    raise SystemExit(f"{name}: nothing was found")
                yield name, took
    finally:
        claims.release_groups(database, held, WORKER)


@contextmanager
def served(database: str, folder: Path) -> Iterator[int]:
    """A gateway on a full database; yields its port."""
    with upstream(16, 0.0) as replica:
        port = free_port()
        env = {
            "STROP_DATA_DIR": str(folder / "strop"),
            "STROP_BASE_MODEL": filling.BASE_MODEL,
            "STROP_REPLICAS": json.dumps([f"http://127.0.0.1:{replica.port}"]),
            "STROP_PORT": str(port),
            "STROP_CONFIG": str(folder / "none.toml"),
            "STROP_DATABASE_URL": database,
        }
        # Not before it is ready: no replica serves what these policies want.
        command = (sys.executable, "-m", "gateway.cli", "serve")
        with started("strop", port, "/healthz", *command, **env):
            yield port


def shown(port: int, rows: list[Chosen]) -> Iterator[tuple[str, float]]:
    """Each page with the milliseconds it took, round by round, for each of the rows."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def get(path: str) -> float:
        began = time.perf_counter()
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        took = 1e3 * (time.perf_counter() - began)
        if response.status != 200 or not body:
            raise SystemExit(f"{path}: {response.status}\n{body[:500].decode()}")
        return took

    yield "overview, the first after the start", get("/")
    for row in rows:
        pages = {
            "overview": "/",
            "policy": f"/policies/{POLICY}",
            "groups": "/groups",
            "groups, older ones of a policy": f"/groups?policy={POLICY}&before={row.began}",
            "group": f"/groups/{POLICY}/{quote(row.group)}",
            "trajectory": f"/trajectories/{quote(row.trajectory)}",
            "tokens of an answer": f"/ui/tokens/{row.completion}/0",
            "steps": "/steps",
            "steps, older ones of a policy": f"/steps?policy={POLICY}&before={row.step}",
            "step": f"/steps/{row.step}",
        }
        for name, path in pages.items():
            yield name, get(path)


def summary(samples: Iterator[tuple[str, float]]) -> dict[str, Row]:
    """Median, 95th percentile and number of the samples, by name."""
    found: dict[str, list[float]] = {}
    for name, took in samples:
        found.setdefault(name, []).append(took)
    return {
        name: {
            "p50_ms": statistics.median(of),
            "p95_ms": statistics.quantiles(of, n=20, method="inclusive")[-1] if of[1:] else of[0],
            "most_ms": max(of),
            "count": len(of),
        }
        for name, of in found.items()
    }


def filled(url: str, completions: int) -> tuple[Database, float | None]:
    """A database with so many completions, and the seconds that filling took; one that holds
    some is taken as it is."""
    database = Database(url)
    database.migrate()
    with database.read() as connection:
        full = connection.execute(select(Group.id).limit(1)).first() is not None
    took = None
    if not full:
        began = time.monotonic()
        filling.fill(
            database,
            completions,
            lambda count, seconds: print(f"{count:,} completions, {seconds:.0f} s", flush=True),
        )
        took = time.monotonic() - began
    history(database)
    return database, took


def measure(url: str, completions: int, rounds: int, folder: Path) -> Row:
    """All questions and pages."""
    database, took = filled(url, completions)
    with database.read() as connection:
        count = connection.execute(select(func.count()).select_from(Completion)).scalar_one()
        size = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
        groups = connection.execute(select(func.count()).select_from(Group)).scalar_one()
    # The first rounds find nothing in memory that a server which runs for days has there.
    questions = summary(asked(database, choose(database, rounds)))
    rows = choose(database, rounds, seed=1)
    with served(url, folder) as port:
        pages = summary(shown(port, rows))
    database.dispose()
    return {
        "completions": count,
        "groups": groups,
        "bytes": size,
        "fill_seconds": took,
        "questions": questions,
        "pages": pages,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep PostgreSQL's files there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(postgresql(options.keep or folder / "postgresql"))
        found = measure(url, options.completions, options.rounds, folder)
    print(
        f"\n{found['completions']:,} completions in {found['groups']:,} groups, "
        f"{found['bytes'] / 2**30:.1f} GiB"
    )
    for kind in ("questions", "pages"):
        print(f"\n{kind:<36}     p50     p95    most, ms")
        for name, row in found[kind].items():
            print(f"{name:<36} {row['p50_ms']:7.1f} {row['p95_ms']:7.1f} {row['most_ms']:7.1f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
