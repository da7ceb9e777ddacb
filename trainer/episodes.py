"""A trajectory and its sub-agents → one episode.

A sub-agent without a reward of its own is a part of its parent's episode: its turns come between
the parent's, in the order in which they were asked for, its sequences are further threads of it,
and it gets the parent's advantage. One whose parent is trained elsewhere, or not at all, is lent
the parent's rewards instead, see `gateway.store.relatives`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gateway.store.records import StoredTrajectory
from gateway.store.relatives import Relatives


@dataclass(frozen=True)
class Episode:
    """A trajectory with all that shares its reward."""

    trajectory: StoredTrajectory
    """Itself, with the completions of its sub-agents among its own."""
    parts: Sequence[StoredTrajectory]
    """Itself as it was logged, first, and its sub-agents."""
    taught: Mapping[tuple[str, int], float]
    """Advantages that were trained on before, by completion and choice."""
    scored_by: StoredTrajectory
    """Whose rewards count: its own, or those of the trajectory that lends them."""

    @property
    def id(self) -> str:
        """Of the trajectory."""
        return self.trajectory.id

    @property
    def revised(self) -> bool:
        """Whether it was decided about before."""
        return self.parts[0].settled_revision is not None

    @cached_property
    def owner(self) -> Mapping[str, StoredTrajectory]:
        """Completion → the trajectory that it was logged in."""
        return {c.id: part for part in self.parts for c in part.completions}


def episodes(members: Sequence[StoredTrajectory], relatives: Relatives) -> list[Episode]:
    """Members of a group, each with its sub-agents."""
    children: dict[str | None, list[StoredTrajectory]] = {}
    for child in relatives.children:
        children.setdefault(child.parent_id, []).append(child)
    return [_episode(member, children, relatives) for member in members]


def _episode(
    member: StoredTrajectory,
    children: Mapping[str | None, Sequence[StoredTrajectory]],
    relatives: Relatives,
) -> Episode:
    parts = [member]
    for part in parts:
        # Grows while it is read: sub-agents of sub-agents come after them.
        parts.extend(children.get(part.id, ()))
    lender = relatives.lent.get(member.id, member)
    if len(parts) == 1:
        return Episode(member, parts, relatives.taught, lender)
    completions = [c for part in parts for c in part.completions]
    completions.sort(key=lambda completion: completion.created_at)
    merged = replace(member, completions=completions)
    return Episode(merged, parts, relatives.taught, merged if lender is member else lender)
