"""Logged completions → the observations that Langfuse shows: agents, and the generations in them.

An observation is always made whole, from what the database says when it is sent. Sent again, with
the same id, it replaces itself; that is how what becomes known later (the step that trained on it,
the advantage) gets there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, select

from gateway.store.models import CompletionUse, Step
from gateway.store.records import Json, StoredCompletion
from gateway.tracing import ids, trees
from gateway.tracing.content import EVENT_BYTES, TRACE_BYTES, cut, dump, size
from gateway.tracing.frames import SMALL, STUB, label, parameters
from gateway.tracing.trees import Families, Node

_SUMMARY = 8_000
"""Bytes that an agent observation repeats of the first question, and of the last answer."""


@dataclass(slots=True)
class Observation:
    """One span, before it is one."""

    trace_id: str
    id: str
    parent_id: str | None
    kind: str
    """`agent` or `generation`."""
    name: str
    start: float
    end: float
    """Unix seconds."""
    completion_id: str | None = None
    """Whose generation it is; None for an agent."""
    trajectory_id: str = ""
    version: str | None = None
    input: str | None = None
    output: str | None = None
    """JSON."""
    metadata: Json = field(default_factory=dict)
    level: str | None = None
    status_message: str | None = None
    trace: Json = field(default_factory=dict)
    """`name`, `session`, `tags` of the trace, as far as they are strop's to say."""
    model: str | None = None
    parameters: Json = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    cost: float | None = None
    first_token: datetime | None = None


def observations(
    connection: Connection, project: str, completion_ids: Sequence[str], public_url: str
) -> list[Observation]:
    """The generations of completions and the agents that they hang in, agents first.

    Completions that are not in the database any more are passed over.
    """
    wanted = set(completion_ids)
    families = trees.read(connection, project, trees.trajectories_of(connection, project, wanted))
    allowed = _allowances(families)
    uses = _uses(connection, wanted)
    found: dict[str, Observation] = {}
    generations = []
    for node in families.nodes.values():
        for completion in node.completions:
            if completion.id not in wanted:
                continue
            if ids.callers_place(completion.traceparent) is None:
                part = families.part_of(completion)
                for above in families.line(node.id):
                    agent = ids.agent_id(project, above.id, part)
                    if above.callers_place() is None and agent not in found:
                        found[agent] = _agent(families, above, part, public_url, allowed)
            generations.append(
                _generation(families, node, completion, uses, public_url, allowed[completion.id])
            )
    return [*found.values(), *generations]


def link_to(public_url: str, trajectory_id: str) -> str:
    """A trajectory's page."""
    return f"{public_url}/trajectories/{quote(trajectory_id, safe='')}"


def _allowances(families: Families) -> dict[str, int]:
    """Bytes of content for each completion, and for each agent observation, by its id.

    A trace is filled in the order in which its completions ended, which is that in which they can
    be sent: what comes later takes nothing away from what is there already.
    """
    left: dict[str, int] = {}
    allowed: dict[str, int] = {}
    sizes: dict[int, int] = {}
    every = [c for node in families.nodes.values() for c in node.completions]
    for completion in sorted(every, key=lambda c: (c.finished_at, c.id)):
        trace = families.place_of(completion).trace_id
        rest = left.get(trace, TRACE_BYTES)
        part = families.part_of(completion)
        agent = ids.agent_id(families.project, completion.trajectory_id, part)
        if agent not in allowed:
            allowed[agent] = max(2 * STUB, min(2 * _SUMMARY, rest))
            rest -= allowed[agent]
        granted = min(_content_size(completion, sizes), EVENT_BYTES, rest)
        allowed[completion.id] = max(STUB, granted)
        left[trace] = rest - allowed[completion.id]
    return allowed


def _content_size(completion: StoredCompletion, sizes: dict[int, int]) -> int:
    # Turns share the messages of the turn before: each is measured once.
    request = completion.request
    total = size(answer_of(completion)) + size(request.get("tools")) + 64
    if not completion.messages:
        total += size(question_of(completion))
    for message in completion.messages:
        key = id(message)
        if key not in sizes:
            sizes[key] = size(message) + 1
        total += sizes[key]
    return total


def _agent(
    families: Families, node: Node, part: int, public_url: str, allowed: dict[str, int]
) -> Observation:
    above = families.above(node.id, part)
    agent = ids.agent_id(families.project, node.id, part)
    link = link_to(public_url, node.id)
    row = node.row
    own = [c for c in node.own or node.completions if families.part_of(c) == part]
    # Of a parent that is known by name alone, or silent in this part, the children say when it was.
    known = own or _below(families, node, part)
    half = allowed.get(agent, 2 * STUB) // 2
    metadata: Json = {"trajectory_id": node.id, "link": link}
    if part:
        metadata["part"] = part + 1
    if row is not None:
        metadata.update(
            group_id=row["group_id"],
            split=row["split"],
            attribution=row["attribution"],
            state=row["state"],
            reason=row["reason"],
            step=row["step_id"],
        )
    first, last = known[0], max(known, key=lambda c: c.finished_at)
    return Observation(
        trace_id=above.trace_id,
        id=agent,
        parent_id=above.parent_id,
        kind="agent",
        name=label(row["policy"] if row is not None else node.id),
        start=min(c.created_at for c in known),
        end=max(c.finished_at for c in known),
        trajectory_id=node.id,
        input=_text(question_of(first), half, link) if own else None,
        output=_text(answer_of(last), half, link) if own else None,
        metadata=metadata,
        trace=_trace(families, node, part),
    )


def _below(families: Families, node: Node, part: int) -> list[StoredCompletion]:
    return [
        completion
        for child in families.nodes.values()
        if node in families.line(child.id)
        for completion in child.completions
        if families.part_of(completion) == part
    ]


def _generation(
    families: Families,
    node: Node,
    completion: StoredCompletion,
    uses: dict[str, list[Json]],
    public_url: str,
    limit: int,
) -> Observation:
    place = families.place_of(completion)
    link = link_to(public_url, completion.trajectory_id)
    answer = answer_of(completion)
    given = question_of(completion)
    output = _text(answer, max(STUB // 2, limit - min(limit // 2, size(given))), link)
    usage = (completion.response or {}).get("usage") or {}
    level = {"error": "ERROR", "aborted": "WARNING"}.get(completion.status)
    joined = ids.callers_place(completion.traceparent) is not None
    metadata: Json = {
        "completion_id": completion.id,
        "trajectory_id": completion.trajectory_id,
        "group_id": node.row["group_id"] if node.row is not None else None,
        "split": node.row["split"] if node.row is not None else None,
        "policy": completion.policy,
        "policy_version": completion.version,
        "status": completion.status,
        "replica": completion.replica,
        "not_trained": completion.reason,
        "client_metadata": _small(completion.client_metadata, link),
        "link": link,
        **_training(uses.get(completion.id, [])),
    }
    return Observation(
        trace_id=place.trace_id,
        id=ids.generation_id(completion.id),
        parent_id=place.parent_id,
        kind="generation",
        name=label(completion.policy),
        start=completion.created_at,
        end=completion.finished_at,
        completion_id=completion.id,
        trajectory_id=completion.trajectory_id,
        version=label(_version(completion)),
        input=_text(given, max(STUB // 2, limit - len(output.encode())), link),
        output=output,
        metadata=metadata,
        level=level,
        status_message=_error(completion, link) if level else None,
        trace={"tags": _tags(node)}
        if joined
        else _trace(families, node, families.part_of(completion)),
        model=label(completion.policy),
        parameters=parameters(completion),
        usage={
            name: count
            for name, count in (
                ("input", completion.prompt_tokens),
                ("output", completion.completion_tokens),
            )
            if count is not None
        },
        cost=usage.get("cost"),
        first_token=_moment(completion.first_token_at),
    )


def _version(completion: StoredCompletion) -> str:
    if completion.version is None:
        return completion.served_model or completion.policy
    return f"{completion.policy}@{completion.version}"


def question_of(completion: StoredCompletion) -> Any:
    """What was asked: messages, with the tools if there are any, or the prompt of a text
    completion; no tokens."""
    request = completion.request
    if completion.messages:
        tools = request.get("tools")
        return {"messages": completion.messages, "tools": tools} if tools else completion.messages
    prompt = request.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(item, str) for item in prompt):
        return f"({completion.prompt_tokens} token ids)"
    return prompt


def answer_of(completion: StoredCompletion) -> Any:
    """What was answered: a message, or one for each of several choices; no tokens."""
    response = completion.response or {}
    found = []
    for choice in response.get("choices") or []:
        message = choice.get("message")
        answer: Any = {"role": "assistant", "content": choice.get("text")}
        if message is not None:
            answer = {name: value for name, value in message.items() if value not in (None, [])}
        if choice.get("finish_reason") not in (None, "stop"):
            answer = {**answer, "finish_reason": choice["finish_reason"]}
        found.append(answer)
    return found[0] if len(found) == 1 else found or response.get("error")


def _error(completion: StoredCompletion, link: str) -> str:
    error = (completion.response or {}).get("error") or {}
    message = error.get("message") if isinstance(error, dict) else error
    return str(cut(message or completion.status, SMALL, link))


def _trace(families: Families, node: Node, part: int) -> Json:
    top = families.line(node.id)[-1]
    trace: Json = {"tags": _tags(node)}
    if top.row is not None:
        name = label(top.row["policy"])
        trace["name"] = f"{name} (part {part + 1})" if part else name
        trace["session"] = label(top.row["group_id"])
    return trace


def _tags(node: Node) -> list[str]:
    if node.row is None:
        return []
    return [label(f"policy:{node.row['policy']}"), label(f"group:{node.row['group_id']}")]


def _uses(connection: Connection, completion_ids: Iterable[str]) -> dict[str, list[Json]]:
    query = (
        select(CompletionUse.__table__, Step.version)
        .outerjoin(Step, Step.id == CompletionUse.step_id)
        .where(CompletionUse.completion_id.in_(sorted(completion_ids)))
        .order_by(CompletionUse.row)
    )
    found: dict[str, list[Json]] = {}
    for row in connection.execute(query).mappings():
        found.setdefault(row["completion_id"], []).append(dict(row))
    return found


def _training(uses: list[Json]) -> Json:
    """What training made of it. Of several uses of a choice the last counts."""
    last = {use["choice"]: use for use in uses}
    if not last:
        return {}

    def by_choice(name: str) -> Any:
        values = {choice: use[name] for choice, use in sorted(last.items())}
        known = {str(choice): value for choice, value in values.items() if value is not None}
        return next(iter(known.values())) if len(last) == 1 and known else known or None

    found = {
        "step": by_choice("step_id"),
        "trained_version": by_choice("version"),
        "advantage": by_choice("advantage"),
        "trained_reward": by_choice("reward"),
        "trained_tokens": by_choice("tokens"),
    }
    reason = by_choice("reason")
    return {**found, "not_trained": reason} if reason is not None else found


def _small(value: Any, link: str) -> Any:
    return cut(value, SMALL, link) if value else None


def _text(value: Any, limit: int, link: str) -> str:
    return dump(cut(value, limit, link)).decode()


def _moment(seconds: float | None) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds is not None else None
