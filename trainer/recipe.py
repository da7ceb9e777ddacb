"""What a step was taken on, small enough to be kept with it, and the samples made from it again.

The token ids and logprobs are in the log already, so a sample is kept as its spans (which answers,
where, with what advantage) and a digest of its token ids.
"""

from collections.abc import Sequence
from dataclasses import fields
from hashlib import blake2b
from typing import Any

import numpy as np
from sqlalchemy import select

from gateway.store import Database, queries
from gateway.store.models import Completion
from gateway.store.records import Json, StoredCompletion
from trainer.samples import ChoiceKey, Ids, Sample, Span

_IN_THE_LOG = ("key", "logprobs")


class LogChanged(Exception):
    """The log does not hold any more what the step was taken on."""


def recipe_of(samples: Sequence[Sample]) -> list[Json]:
    """Samples without what the log has anyway; numbers survive JSON exactly."""
    return [
        {
            "trajectory": sample.trajectory_id,
            "group": sample.group_id,
            "tokens": len(sample.token_ids),
            "digest": _digest(sample.token_ids),
            "spans": [
                {
                    "completion": span.key.completion_id,
                    "choice": span.key.choice,
                    **{
                        field.name: getattr(span, field.name)
                        for field in fields(span)
                        if field.name not in _IN_THE_LOG
                    },
                }
                for span in sample.spans
            ],
        }
        for sample in samples
    ]


def samples_from(database: Database, project: str, recipe: Sequence[Json]) -> list[Sample]:
    """The samples that a recipe was made of, bit for bit.

    Raises:
        LogChanged: something of them was deleted or is not what it was.
    """
    answers = {span["completion"] for one in recipe for span in one["spans"]}
    # Those of a sub-agent are in its own trajectory, and in a sample of its parent's.
    owners = (
        select(Completion.trajectory_id)
        .where(Completion.project == project, Completion.id.in_(answers))
        .distinct()
    )
    with database.read() as connection:
        ids = list(connection.execute(owners).scalars())
        found = queries.trajectories(connection, project, ids)
    completions = {c.id: c for trajectory in found for c in trajectory.completions}
    return [_sample(one, completions) for one in recipe]


def _sample(one: Json, completions: dict[str, StoredCompletion]) -> Sample:
    token_ids = _token_ids(one, completions)
    spans = []
    for written in one["spans"]:
        values: dict[str, Any] = dict(written)
        key = ChoiceKey(values.pop("completion"), values.pop("choice"))
        completion = completions[key.completion_id]
        choice = next(c for c in completion.choices if c.index == key.choice)
        first = values["start"] - len(completion.prompt_ids or ())
        logprobs = (choice.logprobs or [])[first : first + values["stop"] - values["start"]]
        spans.append(Span(key=key, logprobs=logprobs, **values))
    return Sample(one["trajectory"], one["group"], token_ids, spans)


def _token_ids(one: Json, completions: dict[str, StoredCompletion]) -> Ids:
    for span in one["spans"]:
        if span["completion"] not in completions:
            raise LogChanged(
                f"completion {span['completion']}, which the step was taken on, is deleted"
            )
    # The last answer's prompt is what the sample had before it.
    for span in reversed(one["spans"]):
        completion = completions[span["completion"]]
        for choice in completion.choices:
            if choice.index == span["choice"]:
                whole = [*(completion.prompt_ids or ()), *(choice.token_ids or ())]
                ids = np.array(whole[: one["tokens"]], dtype=np.int64)
                if _digest(ids) == one["digest"]:
                    return ids
    raise LogChanged(f"the tokens of trajectory {one['trajectory']} are not what they were")


def _digest(token_ids: Ids) -> str:
    return blake2b(np.ascontiguousarray(token_ids).tobytes(), digest_size=12).hexdigest()
