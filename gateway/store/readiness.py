"""When a group is ready to be trained on: one rule, for who takes it and for who shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, or_, select, tuple_

from gateway.store.models import Group, Policy
from gateway.store.policy_settings import PolicySettings
from gateway.store.queries import GroupSummary


@dataclass(frozen=True, slots=True)
class Readiness:
    """What makes a policy's groups ready, at one moment.

    A group has `waiting` rewarded members that were not decided about before, and `oldest_at`, the
    Unix seconds at which the oldest that waits began, rewarded or not; None where none waits.
    """

    size: int
    """Rewarded members that are enough."""
    began_before: float
    """Unix seconds: an older group is taken with what it has."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], now: float) -> "Readiness":
        """By a policy's settings as they are stored, at `now` (Unix seconds)."""
        fields = PolicySettings.model_fields
        size = settings.get("group_size", fields["group_size"].default)
        deadline = settings.get("deadline_seconds", fields["deadline_seconds"].default)
        return cls(int(size), now - float(deadline))

    def holds(
        self, waiting: int, choices: int | None, closed_at: float | None, oldest_at: float | None
    ) -> bool:
        """Whether a trainer would take it, once nothing is added to it for a moment.

        Args:
            choices: how many there are, in a group of the choices of one completion.
        """
        complete = choices is not None and waiting >= choices
        enough = waiting > 0 and (waiting >= self.size or complete)
        return oldest_at is not None and (enough or self.final(waiting, closed_at, oldest_at))

    def final(self, waiting: int, closed_at: float | None, oldest_at: float) -> bool:
        """Whether it gets no more rewards, or need not wait for them."""
        return closed_at is not None or (waiting > 0 and oldest_at <= self.began_before)


def is_ready(connection: Connection, now: float) -> ColumnElement[bool]:
    """`Readiness.holds` for the rows of `groups` of all policies, as a condition.

    Models that are not trained have groups too, which are never ready.
    """
    usual = Readiness.of({}, now)
    others: dict[Readiness, list[tuple[str, str]]] = {}
    query = select(Policy.project, Policy.name, Policy.settings)
    for project, name, settings in connection.execute(query):
        found = Readiness.of(settings, now)
        if found != usual:
            others.setdefault(found, []).append((project, name))
    owner = tuple_(Group.project, Group.policy)

    def chosen(of: str) -> Any:
        if not others:
            return getattr(usual, of)
        cases = [(owner.in_(owners), getattr(rule, of)) for rule, owners in others.items()]
        return case(*cases, else_=getattr(usual, of))

    rewarded = or_(
        Group.waiting >= chosen("size"),
        Group.waiting >= Group.choices,
        Group.oldest_at <= chosen("began_before"),
    )
    known = select(Policy.name).where(Policy.project == Group.project, Policy.name == Group.policy)
    return and_(
        known.exists(),
        Group.oldest_at.is_not(None),
        or_(Group.closed_at.is_not(None), and_(Group.waiting > 0, rewarded)),
    )


def with_states(
    groups: Sequence[GroupSummary], policies: Sequence[Mapping[str, Any]], now: float
) -> list[GroupSummary]:
    """The groups of one project, with `ready` and `skipped` among their states.

    Args:
        policies: rows of the policies of that project.
    """
    rules = {row["name"]: Readiness.of(row["settings"], now) for row in policies}
    return [replace(one, state=_state(one, rules.get(one.policy))) for one in groups]


def _state(group: GroupSummary, rule: Readiness | None) -> str:
    if group.state == "trained" and not group.used:
        return "skipped"
    if group.state != "open" or rule is None:
        return group.state
    numbers = (group.waiting, group.choices, group.closed_at, group.oldest_at)
    return "ready" if rule.holds(*numbers) else "open"
