"""The way back: from a trace or observation of Langfuse's to what it stands for."""

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from gateway.store.models import Completion, Trajectory
from gateway.store.tracing_models import LangfuseTrace
from gateway.tracing import ids


@dataclass(slots=True, frozen=True)
class Target:
    """A completion, or a whole trajectory."""

    trajectory_id: str
    completion_id: str | None = None


def target_of(
    connection: Connection, project: str, trace_id: str | None, observation_id: str | None
) -> Target | None:
    """What a score on a trace, or on an observation in it, judges; None if nothing of strop's."""
    # Of those that were sent some may have been deleted since.
    query = (
        select(LangfuseTrace.trajectory_id, Trajectory.parent_id)
        .join(
            Trajectory,
            (Trajectory.project == LangfuseTrace.project)
            & (Trajectory.id == LangfuseTrace.trajectory_id),
        )
        .where(LangfuseTrace.project == project, LangfuseTrace.trace_id == trace_id)
    )
    rows = sorted(connection.execute(query).tuples(), key=lambda row: row[0])
    inside = [trajectory_id for trajectory_id, _ in rows]
    if observation_id is None:
        own = [t for t in inside if trace_id == t or _part(trace_id, ids.trace_id, project, t)]
        # Of a caller's trace with one trajectory in it, that one is meant; a sub-agent never is.
        alone = [t for t, parent in rows if parent is None and len(rows) == 1]
        chosen = own or alone
        return Target(chosen[0]) if chosen else None
    for trajectory_id in inside:
        if _part(observation_id, ids.agent_id, project, trajectory_id):
            return Target(trajectory_id)
    completions = select(Completion.id, Completion.trajectory_id).where(
        Completion.project == project, Completion.trajectory_id.in_(inside)
    )
    for row in connection.execute(completions):
        if ids.generation_id(row.id) == observation_id:
            return Target(row.trajectory_id, row.id)
    return None


def _part(
    found: str | None, id_of: Callable[[str, str, int], str], project: str, trajectory_id: str
) -> bool:
    """Whether an id is that of a trajectory, in any of its parts."""
    return any(id_of(project, trajectory_id, part) == found for part in range(ids.MOST_PARTS))
