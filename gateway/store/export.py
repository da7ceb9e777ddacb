"""The log as files: chats with rewards, OpenAI's fine-tuning format, exact tokens.

A chat is a line of turns to its end: one for every answer that no later turn continues, so that
each logged answer is in at least one. Its reward is the trainer's score of it: the newest reward of
each name, weighted as the policy says, summed over the episode and over those choices in its line
that were rewarded one by one.

The log is read in batches of trajectories, each in a transaction of its own: an export of any size
neither fills the memory nor holds the database.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from sqlalchemy import ColumnElement, and_, func, or_, select

from gateway.store import queries
from gateway.store.database import Database
from gateway.store.models import Trajectory
from gateway.store.records import Json, StoredCompletion, StoredReward, StoredTrajectory

BATCH = 16
"""Trajectories that are read at once."""

_ROWS, _TOKENS = 1024, 1_000_000
"""A row group of a Parquet file is written when it has so many rows or so many tokens."""

_OPENAI_FIELDS = ("role", "content", "refusal", "name", "tool_calls", "tool_call_id", "weight")


@dataclass(slots=True)
class Selection:
    """What to export; None selects all."""

    project: str
    policy: str | None = None
    split: str | None = None
    min_reward: float | None = None
    """Leaves out chats with a smaller reward, and those without any."""

    def clauses(self) -> list[ColumnElement[bool]]:
        """The conditions on trajectories."""
        found = [Trajectory.project == self.project]
        if self.policy is not None:
            found.append(Trajectory.policy == self.policy)
        if self.split is not None:
            found.append(Trajectory.split == self.split)
        return found

    def takes(self, reward: float | None) -> bool:
        """Whether a reward is enough."""
        return self.min_reward is None or (reward is not None and reward >= self.min_reward)


@dataclass(slots=True)
class Answer:
    """One choice of a completion, with what its line of turns was worth."""

    trajectory: StoredTrajectory
    completion: StoredCompletion
    choice: int
    message: Json | None
    """None where it broke off before anything could be kept of it."""
    last: bool
    """Whether no later turn continues it."""
    rewards: list[StoredReward]
    """Every one that counts for it or counted before it was corrected, oldest first."""
    reward: float | None


def count(database: Database, selection: Selection) -> int:
    """Trajectories that an export goes through."""
    query = select(func.count()).select_from(Trajectory).where(*selection.clauses())
    with database.read() as connection:
        return int(connection.execute(query).scalar_one())


def batches(database: Database, selection: Selection) -> Iterator[list[Answer]]:
    """The answers of all selected trajectories, the oldest first, some trajectories at a time."""
    with database.read() as connection:
        weights = {
            policy["name"]: policy["settings"].get("reward_weights", {})
            for policy in queries.policies(connection, selection.project)
        }
    query = (
        select(Trajectory.created_at, Trajectory.id)
        .where(*selection.clauses())
        .order_by(Trajectory.created_at, Trajectory.id)
        .limit(BATCH)
    )
    page = query
    while True:
        with database.read() as connection:
            rows = connection.execute(page).all()
            if not rows:
                return
            found = queries.trajectories(connection, selection.project, [row.id for row in rows])
        yield [
            answer
            for trajectory in found
            for answer in answers(trajectory, weights.get(trajectory.policy, {}))
            if selection.takes(answer.reward)
        ]
        at, id = rows[-1]
        page = query.where(
            Trajectory.created_at >= at,
            or_(Trajectory.created_at > at, and_(Trajectory.created_at == at, Trajectory.id > id)),
        )


def answers(trajectory: StoredTrajectory, weights: Mapping[str, float]) -> list[Answer]:
    """All choices of a trajectory; reward weights not given are 1."""
    completions = {completion.id: completion for completion in trajectory.completions}
    continued = {
        (completion.parent_id, completion.parent_choice)
        for completion in trajectory.completions
        if completion.status == "complete"
    }
    found = []
    for completion in trajectory.completions:
        messages = {
            choice.get("index", 0): choice.get("message")
            for choice in (completion.response or {}).get("choices", ())
        }
        for index in sorted(messages.keys() | {choice.index for choice in completion.choices}):
            counted = _counted(trajectory, _line(completion, index, completions))
            found.append(
                Answer(
                    trajectory=trajectory,
                    completion=completion,
                    choice=index,
                    message=messages.get(index),
                    last=(completion.id, index) not in continued,
                    rewards=[reward for _, reward in counted],
                    reward=_sum(counted, weights),
                )
            )
    return found


def _line(
    completion: StoredCompletion, choice: int, completions: Mapping[str, StoredCompletion]
) -> set[tuple[str, int]]:
    """The choices that lead to one, itself included."""
    line: set[tuple[str, int]] = set()
    turn, index = completion, choice
    while (turn.id, index) not in line:
        line.add((turn.id, index))
        before = completions.get(turn.parent_id or "")
        if before is None or turn.parent_choice is None:
            break
        index, turn = turn.parent_choice, before
    return line


_Target = tuple[str | None, int | None]
_Counted = list[tuple[_Target, StoredReward]]


def _counted(trajectory: StoredTrajectory, line: set[tuple[str, int]]) -> _Counted:
    """The rewards that count for a line with what they were posted against, oldest first."""
    answers = {completion.id: len(completion.choices) for completion in trajectory.completions}
    found: _Counted = []
    for reward in sorted(trajectory.rewards, key=lambda reward: reward.created_at):
        id, choice = reward.completion_id, reward.choice
        # A reward for the only choice is one for the completion.
        if id is None or choice is None or answers.get(id, 1) <= 1:
            found.append(((id, None), reward))
        elif (id, choice) in line:
            found.append(((id, choice), reward))
    return found


def _sum(counted: _Counted, weights: Mapping[str, float]) -> float | None:
    newest = {(target, reward.name): reward.reward for target, reward in counted}
    if not newest:
        return None
    return sum(weights.get(name, 1.0) * value for (_, name), value in newest.items())


def lines(database: Database, selection: Selection, format: str) -> Iterator[bytes]:
    """A JSONL export, in pieces of whole lines; one piece a batch, some of them empty.

    Args:
        format: `jsonl`, chats with all that strop knows of them; or `openai`, messages and tools
            alone, as OpenAI's fine-tuning takes them.
    """
    line = _openai_line if format == "openai" else _jsonl_line
    for batch in batches(database, selection):
        yield b"".join(
            orjson.dumps(line(answer), option=orjson.OPT_APPEND_NEWLINE)
            for answer in batch
            if answer.last and answer.message and answer.completion.status == "complete"
        )


def _jsonl_line(answer: Answer) -> Json:
    completion, trajectory = answer.completion, answer.trajectory
    tools = completion.request.get("tools")
    return {
        "messages": [*completion.messages, answer.message],
        **({"tools": tools} if tools else {}),
        "reward": answer.reward,
        "model": completion.policy,
        "created": completion.created_at,
        "metadata": completion.client_metadata or {},
        "strop": {
            "trajectory_id": trajectory.id,
            "group_id": trajectory.group_id,
            "completion_id": completion.id,
            "choice": answer.choice,
            "version": completion.version,
            "split": trajectory.split,
            "reason": completion.reason,
            "rewards": [asdict(reward) for reward in answer.rewards],
        },
    }


def _openai_line(answer: Answer) -> Json:
    messages = [
        {
            name: message[name]
            for name in _OPENAI_FIELDS
            # An answer is logged with the nulls and the extras of the server that gave it.
            if message.get(name) is not None and message[name] != []
        }
        for message in (*answer.completion.messages, answer.message or {})
    ]
    tools = answer.completion.request.get("tools")
    return {"messages": messages, **({"tools": tools} if tools else {})}


class MissingPyarrow(Exception):
    """Parquet was asked for, and pyarrow is not installed."""


def write_parquet(
    database: Database,
    selection: Selection,
    file: Path | BinaryIO,
    advance: Callable[[int], None] = lambda _: None,
) -> int:
    """Write one row for every sampled choice, with exact tokens; returns how many.

    Args:
        advance: called with the number of trajectories that were gone through.

    Raises:
        MissingPyarrow: pyarrow is not installed.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingPyarrow("Parquet needs pyarrow. Install it: pip install pyarrow.") from None
    schema = _schema(arrow)
    written = 0
    with parquet.ParquetWriter(file, schema, compression="zstd") as output:

        def flush(rows: list[Json]) -> int:
            if rows:
                output.write_table(arrow.Table.from_pylist(rows, schema))
            return len(rows)

        waiting: list[Json] = []
        tokens = 0
        for batch in batches(database, selection):
            for answer in batch:
                waiting.append(row := _row(answer))
                tokens += len(row["prompt_token_ids"] or ()) + len(row["token_ids"] or ())
                if len(waiting) >= _ROWS or tokens >= _TOKENS:
                    written += flush(waiting)
                    waiting, tokens = [], 0
            advance(BATCH)
        return written + flush(waiting)


def _schema(arrow: Any) -> Any:
    text, ids = arrow.string(), arrow.list_(arrow.uint32())
    return arrow.schema(
        {
            "trajectory_id": text,
            "group_id": text,
            "completion_id": text,
            "parent_id": text,
            "choice": arrow.int32(),
            "policy": text,
            "version": arrow.int32(),
            "split": text,
            "status": text,
            "reason": text,
            "finish_reason": text,
            "created_at": arrow.float64(),
            "reward": arrow.float64(),
            "prompt_token_ids": ids,
            "token_ids": ids,
            "logprobs": arrow.list_(arrow.float32()),
            "messages": text,
            "answer": text,
            "metadata": text,
        }
    )


def _row(answer: Answer) -> Json:
    completion, trajectory = answer.completion, answer.trajectory
    sampled = next((c for c in completion.choices if c.index == answer.choice), None)
    return {
        "trajectory_id": trajectory.id,
        "group_id": trajectory.group_id,
        "completion_id": completion.id,
        "parent_id": completion.parent_id,
        "choice": answer.choice,
        "policy": completion.policy,
        "version": completion.version,
        "split": trajectory.split,
        "status": completion.status,
        "reason": completion.reason,
        "finish_reason": sampled.finish_reason if sampled else None,
        "created_at": completion.created_at,
        "reward": answer.reward,
        "prompt_token_ids": completion.prompt_ids,
        "token_ids": sampled.token_ids if sampled else None,
        "logprobs": sampled.logprobs if sampled else None,
        "messages": orjson.dumps(completion.messages).decode(),
        "answer": orjson.dumps(answer.message).decode() if answer.message else None,
        "metadata": orjson.dumps(completion.client_metadata or {}).decode(),
    }
