"""Where trajectories hang in Langfuse: their families, read from the store, and their places.

A trajectory is an agent observation: at the top of a trace of its own, or, for a sub-agent, inside
its parent's. One whose caller traces itself has no observation; its completions hang in the
caller's trace. What is too long for one trace goes on in a second of the same session, a third and
so on, in which the same agents stand again; a caller's trace is the caller's, however long.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, RowMapping, select

from gateway.store.models import Completion, Trajectory
from gateway.store.reading import stored_completions
from gateway.store.records import StoredCompletion
from gateway.tracing import ids
from gateway.tracing.content import FRAMES_BYTES
from gateway.tracing.frames import STUB, frame
from gateway.tracing.ids import Place

_DEEPEST = 64


@dataclass(slots=True)
class Node:
    """A trajectory with its completions, oldest first."""

    id: str
    row: RowMapping | None
    """None where only its children are known."""
    completions: list[StoredCompletion] = field(default_factory=list)

    @property
    def own(self) -> list[StoredCompletion]:
        """The completions that no caller traces."""
        return [c for c in self.completions if ids.callers_place(c.traceparent) is None]

    def callers_place(self) -> Place | None:
        """Where its caller has it, if the caller's trace is what it is known by."""
        if self.row is None or self.row["attribution"] != "traceparent":
            return None
        for completion in self.completions:
            found = ids.callers_place(completion.traceparent)
            if found is not None:
                return found
        return Place(self.id, None)


class Families:
    """Trajectories with all that may share their traces: ancestors and their descendants."""

    def __init__(self, project: str, nodes: dict[str, Node]):
        self.project = project
        self.nodes = nodes
        self._parts: dict[str, int] | None = None

    def line(self, trajectory_id: str) -> list[Node]:
        """A trajectory and its ancestors, the topmost last."""
        found: list[Node] = []
        current: str | None = trajectory_id
        while current is not None and len(found) < _DEEPEST:
            node = self.nodes.get(current)
            if node is None or node in found:
                break
            found.append(node)
            current = node.row["parent_id"] if node.row is not None else None
        return found

    def above(self, trajectory_id: str, part: int = 0) -> Place:
        """The trace of a trajectory, and what its agent observation hangs in, if in anything."""
        line = self.line(trajectory_id)
        if len(line) > 1:
            return self.place(line[1].id, part)
        return Place(ids.trace_id(self.project, trajectory_id, part), None)

    def place(self, trajectory_id: str, part: int = 0) -> Place:
        """The trace of a trajectory, and the observation that its own completions hang in."""
        trace = None
        place = None
        for node in reversed(self.line(trajectory_id)):
            place = node.callers_place()
            if place is None:
                trace = trace or ids.trace_id(self.project, node.id, part)
                place = Place(trace, ids.agent_id(self.project, node.id, part))
            trace = place.trace_id
        assert place is not None
        return place

    def place_of(self, completion: StoredCompletion) -> Place:
        """Where the generation of a completion hangs."""
        callers = ids.callers_place(completion.traceparent)
        return callers or self.place(completion.trajectory_id, self.part_of(completion))

    def part_of(self, completion: StoredCompletion) -> int:
        """Which of the traces of its trajectory a completion is in, from 0.

        Traces are filled in the order in which completions ended, which is that in which they can
        be sent: what comes later moves nothing that is there already.
        """
        if self._parts is None:
            self._parts = self._divided()
        return self._parts.get(completion.id, 0)

    def _divided(self) -> dict[str, int]:
        tops: dict[str, str] = {}
        for node in self.nodes.values():
            line = self.line(node.id)
            if all(one.callers_place() is None for one in line):
                tops[node.id] = line[-1].id
        found: dict[str, int] = {}
        filled: dict[str, int] = {}
        inside: set[tuple[str, int]] = set()
        own = [c for node in self.nodes.values() if node.id in tops for c in node.own]
        for completion in sorted(own, key=lambda c: (c.finished_at, c.id)):
            top = tops[completion.trajectory_id]
            weight = STUB + frame(completion, self.nodes[completion.trajectory_id].row)
            total = filled.get(top, 0)
            part = total // FRAMES_BYTES
            if total % FRAMES_BYTES + 2 * weight > FRAMES_BYTES:
                part += 1
                total = part * FRAMES_BYTES
            part = min(part, ids.MOST_PARTS - 1)
            if (completion.trajectory_id, part) not in inside:
                # Its agent stands in that trace too.
                inside.add((completion.trajectory_id, part))
                total += weight + STUB
            found[completion.id] = part
            filled[top] = total + weight
        return found


def read(connection: Connection, project: str, trajectory_ids: Iterable[str]) -> Families:
    """The families of trajectories, with the text of all their completions."""
    nodes: dict[str, Node] = {}
    wanted = set(trajectory_ids)
    for _ in range(_DEEPEST):
        rows = _rows(connection, project, Trajectory.id, wanted)
        for each in wanted:
            nodes[each] = Node(each, rows.get(each))
        wanted = {row["parent_id"] for row in rows.values()} - {None} - nodes.keys()
        if not wanted:
            break
    wanted = set(nodes)
    for _ in range(_DEEPEST):
        rows = _rows(connection, project, Trajectory.parent_id, wanted)
        wanted = rows.keys() - nodes.keys()
        for each in wanted:
            nodes[each] = Node(each, rows[each])
        if not wanted:
            break
    for completion in stored_completions(connection, project, list(nodes), tokens=False):
        nodes[completion.trajectory_id].completions.append(completion)
    return Families(project, nodes)


def trajectories_of(
    connection: Connection, project: str, completion_ids: Iterable[str]
) -> set[str]:
    """The trajectories of completions, as far as they are there."""
    query = select(Completion.trajectory_id).where(
        Completion.project == project, Completion.id.in_(sorted(completion_ids))
    )
    return set(connection.execute(query).scalars())


def _rows(
    connection: Connection, project: str, column: Any, values: set[str]
) -> dict[str, RowMapping]:
    query = select(Trajectory.__table__).where(
        Trajectory.project == project, column.in_(sorted(values))
    )
    return {row["id"]: row for row in connection.execute(query).mappings()}
