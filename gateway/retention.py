"""Deletes trajectories in which nothing has happened for longer than they are to be kept."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from sqlalchemy import Connection, select

from gateway.store import Database, deletion, retention
from gateway.store.models import Trajectory
from gateway.store.writer import Writer

log = logging.getLogger("strop.retention")

_PAUSE_SECONDS = 3600.0
_WAITING_SECONDS = 60.0
_BATCH = 20
"""Trajectories in one transaction: requests wait for it."""


async def keep_deleting(
    database: Database,
    writer: Writer,
    days: float | None,
    by_project: Mapping[str, float],
    is_ours: Callable[[], bool] = lambda: True,
) -> None:
    """Delete what is too old, and look again every hour, until cancelled.

    Args:
        days: how long projects are kept that neither have a rule of their own in the database
            nor are in `by_project`; None: for ever.
        by_project: days by project.
        is_ours: false while another process of this machine does it.
    """
    while True:
        try:
            if not is_ours():
                await asyncio.sleep(_WAITING_SECONDS)
                continue
            deleted = await delete_once(database, writer, days, by_project, time.time())
            if deleted:
                log.info("%d trajectories were older than they are to be kept: deleted", deleted)
        except Exception:
            log.exception("deleting what is too old failed; trying again in an hour")
        await asyncio.sleep(_PAUSE_SECONDS)


async def delete_once(
    database: Database,
    writer: Writer,
    days: float | None,
    by_project: Mapping[str, float],
    now: float,
) -> int:
    """Delete what had its last completion or reward too long ago; returns how many trajectories.

    Args:
        days, by_project: as for `keep_deleting`.
        now: Unix seconds.
    """
    total = 0
    for project, kept in (await asyncio.to_thread(_rules, database, days, by_project)).items():
        total += (await delete_before(writer.run, project, now - kept * 86_400)).trajectories
    return total


Deletion = Callable[[Connection], deletion.Deleted]


async def delete_before(
    write: Callable[[Deletion], Awaitable[deletion.Deleted]],
    project: str,
    before: float,
    *,
    forget_uses: bool = False,
) -> deletion.Deleted:
    """Delete all trajectories of a project in which nothing happened since a time.

    Args:
        write: runs each of several transactions.
        before: Unix seconds.
    """
    total = deletion.Deleted()
    while True:
        deleted = await write(
            lambda connection: deletion.delete_older_than(
                connection, project, before, _BATCH, forget_uses=forget_uses
            )
        )
        total += deleted
        if deleted.trajectories < _BATCH:
            return total


def _rules(
    database: Database, days: float | None, by_project: Mapping[str, float]
) -> dict[str, float]:
    """Days by project, of those that are not kept for ever."""
    with database.read() as connection:
        rules: dict[str, float | None] = {**by_project, **retention.read_all(connection)}
        if days is not None:
            projects = connection.execute(select(Trajectory.project).distinct()).scalars()
            rules = {**dict.fromkeys(projects, days), **rules}
    return {project: kept for project, kept in rules.items() if kept is not None}
