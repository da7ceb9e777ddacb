"""Which versions' files stay: the newest, the best by what they earned, and every m-th.

What is served, on trial, waiting, loaded or trained from stays whatever the settings say. What a
trainer wrote that was killed before it could record it goes.
"""

import logging
import shutil
import time
from pathlib import Path
from typing import Any

from sqlalchemy import select, update

from gateway.store import Database, queries, statistics, steps
from gateway.store.claims import TrainablePolicy
from gateway.store.life_settings import Keep
from gateway.store.models import Version
from trainer import checkpoints

log = logging.getLogger("strop.trainer")

_OUT_OF_SERVICE = ("retired", "failed", "superseded")


def tidy(database: Database, artifacts: Path, policy: TrainablePolicy, keep: Keep) -> None:
    """Delete what need not be kept, and what never became a version."""
    prune(database, policy, keep)
    sweep(database, artifacts, policy)


def prune(database: Database, policy: TrainablePolicy, keep: Keep) -> list[int]:
    """Delete the files of versions that need not be kept; returns their numbers."""
    deleted = []
    for row in _prunable(database, policy, keep):
        path = Path(row["adapter_path"])
        # Marked first: a version whose files are half gone must not be gone back to.
        if not _mark(database, policy, row["number"], row["state"]):
            continue
        shutil.rmtree(path, ignore_errors=True)
        deleted.append(row["number"])
    if deleted:
        names = ", ".join(f"@{number}" for number in deleted)
        log.info("%s: files of %s deleted, as the policy's keep settings say", policy.name, names)
    return deleted


def sweep(database: Database, artifacts: Path, policy: TrainablePolicy) -> list[Path]:
    """Delete folders of steps that failed after they had written one; returns them.

    A step that failed cannot be finished any more, so nobody else is about to record the folder.
    """
    parent = checkpoints.policy_folder(artifacts, policy.project, policy.name)
    named = ((path, checkpoints.step_of(path)) for path in sorted(parent.glob("[0-9]*-*")))
    found = {path: step_id for path, step_id in named if step_id is not None}
    if not found:
        return []
    with database.read() as connection:
        recorded = set(
            connection.scalars(
                select(Version.adapter_path).where(Version.adapter_path.in_(map(str, found)))
            )
        )
        unrecorded = {path: step for path, step in found.items() if str(path) not in recorded}
        deleted = [
            path
            for path, step_id in unrecorded.items()
            if _wrote(steps.step(connection, policy.project, step_id), path)
        ]
    for path in deleted:
        checkpoints.discard(path)
        log.info("%s: %s deleted, whose step was given up", policy.name, path)
    return deleted


def _wrote(step: steps.Row | None, folder: Path) -> bool:
    """Whether a folder is of this step, which failed, and not of another database's."""
    if step is None or step["state"] != "failed":
        return False
    try:
        record = checkpoints.load_record(folder)
    except (OSError, ValueError, TypeError):
        return False
    planned = {span["completion"] for s in step["config"].get("samples", ()) for span in s["spans"]}
    return bool(record.completions) and planned.issuperset(record.completions)


def kept(rows: list[queries.Row], rewards: list[statistics.VersionReward], keep: Keep) -> set[int]:
    """The numbers of the versions that the settings keep."""
    numbers = sorted((row["number"] for row in rows), reverse=True)
    held_out = {reward.version for reward in rewards if reward.split == "eval"}
    split = "eval" if held_out else "train"
    means = {reward.version: reward.mean for reward in rewards if reward.split == split}
    best = sorted((n for n in numbers if n in means), key=lambda n: (-means[n], -n))
    regular = {n for n in numbers if keep.every and n % keep.every == 0}
    return {0, *numbers[: keep.newest], *best[: keep.best], *regular}


def _prunable(database: Database, policy: TrainablePolicy, keep: Keep) -> list[queries.Row]:
    now = time.time()
    with database.read() as connection:
        there = [
            row
            for row in queries.versions(connection, policy.project, policy.name)
            if row["deleted_at"] is None
        ]
        candidates = [
            row
            for row in there
            if row["state"] in _OUT_OF_SERVICE
            and row["adapter_path"] is not None
            and row["ended_at"] is not None
            and row["ended_at"] + keep.after_seconds <= now
        ]
        if len(there) <= keep.newest or not candidates:
            return []
        current = queries.policy(connection, policy.project, policy.name)
        rewards = statistics.rewards_by_version(connection, policy.project, policy.name)
    # What the settings measure the distance to is read at every start of a trainer.
    stays: set[Any] = {*kept(there, rewards, keep), policy.settings.get("kl_version")}
    if current is not None:
        stays |= {current["alias"], current["head"], current["canary"]}
        # The KL term keeps near it.
        stays.add(current["settings"].get("kl_version"))
    # A step may have begun from it and not be over.
    stays.add(policy.head)
    return [row for row in candidates if row["number"] not in stays]


def _mark(database: Database, policy: TrainablePolicy, number: int, state: str) -> bool:
    with database.write() as connection:
        return bool(
            connection.execute(
                update(Version)
                .where(
                    Version.project == policy.project,
                    Version.policy == policy.name,
                    Version.number == number,
                    Version.state == state,
                    Version.deleted_at.is_(None),
                )
                .values(deleted_at=time.time())
            ).rowcount
        )
