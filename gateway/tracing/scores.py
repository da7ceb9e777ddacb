"""Rewards → Langfuse's scores: one for each name of each thing that was judged.

A correction replaces the score, as the newest reward of a name is the one that counts; a score
whose rewards are all withdrawn is deleted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, RowMapping, select

from gateway.store.models import Reward
from gateway.store.records import Json
from gateway.tracing import ids, trees
from gateway.tracing.content import cut
from gateway.tracing.observations import link_to

SOURCE = "langfuse"
"""Source of the rewards that were scores: they are in Langfuse already."""

_COMMENT = 10_000
_DETAILS = 10_000
_Key = tuple[str, str | None, int | None, str]


@dataclass(slots=True, frozen=True)
class Score:
    """A score as it should be; without a body it should not be."""

    id: str
    body: Json | None
    reward_ids: tuple[str, ...]
    """The rewards that it stands for."""


def scores(
    connection: Connection, project: str, reward_ids: Sequence[str], public_url: str
) -> list[Score]:
    """The scores that rewards are part of. Rewards that are not in the database are passed over."""
    asked = list(
        connection.execute(select(Reward.__table__).where(Reward.id.in_(reward_ids))).mappings()
    )
    trajectories = {row["trajectory_id"] for row in asked}
    everything: dict[_Key, list[RowMapping]] = {}
    query = (
        select(Reward.__table__)
        .where(Reward.project == project, Reward.trajectory_id.in_(sorted(trajectories)))
        .order_by(Reward.created_at, Reward.row)
    )
    for row in connection.execute(query).mappings():
        everything.setdefault(_key(row), []).append(row)
    families = trees.read(connection, project, trajectories)
    found = []
    for key in dict.fromkeys(_key(row) for row in asked):
        rows = everything[key]
        if all(row["source"] == SOURCE for row in rows):
            continue
        found.append(_score(families, project, key, rows, public_url))
    return found


def _key(row: RowMapping) -> _Key:
    return row["trajectory_id"], row["completion_id"], row["choice"], row["name"]


def _score(
    families: trees.Families,
    project: str,
    key: _Key,
    rows: Sequence[RowMapping],
    public_url: str,
) -> Score:
    trajectory_id, completion_id, choice, name = key
    score_id = ids.score_id(project, trajectory_id, completion_id, choice, name)
    reward_ids = tuple(row["id"] for row in rows)
    counting = [row for row in rows if row["withdrawn_at"] is None]
    if not counting:
        return Score(score_id, None, reward_ids)
    newest = counting[-1]
    link = link_to(public_url, trajectory_id)
    trace_id, observation_id = _target(families, trajectory_id, completion_id)
    metadata: Json = {
        "reward_id": newest["id"],
        "source": newest["source"],
        "completion_id": completion_id,
        "trajectory_id": trajectory_id,
        "choice": choice,
        "corrections": len(counting) - 1,
        "details": cut(newest["details"], _DETAILS, link) if newest["details"] else None,
    }
    body: Json = {
        "id": score_id,
        "traceId": trace_id,
        "observationId": observation_id,
        "name": name,
        "value": float(newest["reward"]),
        "dataType": "NUMERIC",
        "comment": cut(newest["comment"], _COMMENT, link) if newest["comment"] else None,
        "metadata": {key: value for key, value in metadata.items() if value is not None},
        # Langfuse replaces a score only under its first timestamp.
        "timestamp": datetime.fromtimestamp(rows[0]["created_at"], UTC).isoformat(),
    }
    return Score(score_id, {k: v for k, v in body.items() if v is not None}, reward_ids)


def _target(
    families: trees.Families, trajectory_id: str, completion_id: str | None
) -> tuple[str, str | None]:
    node = families.nodes[trajectory_id]
    if completion_id is not None:
        for completion in node.completions:
            if completion.id == completion_id:
                trace_id = families.place_of(completion).trace_id
                return trace_id, ids.generation_id(completion_id)
    if node.own:
        place = families.above(trajectory_id)
        # The whole trace is judged where it is this trajectory's.
        observation = ids.agent_id(families.project, trajectory_id) if place.parent_id else None
        return place.trace_id, observation
    # Callers trace all of it themselves.
    first = families.place_of(node.completions[0]) if node.completions else None
    return (first or families.place(trajectory_id)).trace_id, None
