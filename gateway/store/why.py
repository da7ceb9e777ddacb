"""What became of a completion, a trajectory or a group, and what it waits for, in words."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, select

from gateway.store import queries
from gateway.store.models import Completion, CompletionUse, Group, Step, Trajectory
from gateway.store.policy_settings import PolicySettings
from gateway.store.reasons import span, words
from gateway.store.relatives import has_reward, stands_alone

Row = dict[str, Any]

_COLUMNS = (
    *Trajectory.__table__.columns,
    has_reward.label("has_reward"),
    stands_alone.label("alone"),
)

_MEMBERS = 500
"""Most members of a group that are looked at."""


@dataclass(slots=True)
class Why:
    """An answer to the question why something was trained on, or was not, or not yet."""

    id: str
    kind: str
    """`completion`, `trajectory` or `group`."""
    policy: str
    state: str
    """`used`, `skipped`, `waiting`, `held_out` (`split=eval`) or `not_trained` (no policy's)."""
    reason: str | None
    """Why it, or its newest revision, was left out."""
    sentences: list[str] = field(default_factory=list)
    uses: list[Row] = field(default_factory=list)
    """Every time that the trainer decided about an answer of it, the first one first."""


def why(connection: Connection, project: str, id: str, now: float | None = None) -> list[Why]:
    """What there is to say about everything that has this id; empty if nothing has."""
    now = time.time() if now is None else now
    found = connection.execute(
        select(Completion.trajectory_id).where(Completion.project == project, Completion.id == id)
    ).scalar_one_or_none()
    if found is not None:
        return [_completion(connection, project, id, found, now)]
    row = _trajectory_row(connection, project, id)
    if row is not None:
        return [_trajectory(connection, project, row, now)]
    query = select(Group.__table__).where(Group.project == project, Group.id == id)
    rows = connection.execute(query.order_by(Group.policy)).mappings()
    return [_group(connection, project, dict(row), now) for row in rows]


def _trajectory_row(connection: Connection, project: str, id: str) -> Row | None:
    query = select(*_COLUMNS).where(Trajectory.project == project, Trajectory.id == id)
    found = connection.execute(query).mappings().one_or_none()
    return dict(found) if found is not None else None


def _completion(
    connection: Connection, project: str, id: str, trajectory_id: str, now: float
) -> Why:
    row = connection.execute(
        select(Completion.policy, Completion.reason, Completion.status).where(Completion.id == id)
    ).one()
    uses = _uses(connection, CompletionUse.completion_id == id)
    owner = _trajectory_row(connection, project, trajectory_id)
    assert owner is not None
    answer = Why(id, "completion", row.policy, "waiting", row.reason, uses=uses)
    if row.policy != owner["policy"]:
        answer.state = "not_trained"
        answer.sentences.append(
            f"It was answered by {row.policy}, in an episode of {owner['policy']}: it is context "
            "there, and not trained on."
        )
        return answer
    answer.sentences += _told(connection, uses)
    last = uses[-1] if uses else None
    if any(use["reason"] is None for use in uses):
        answer.state = "used"
    elif last is not None:
        answer.state, answer.reason = "skipped", last["reason"]
    elif row.reason is not None:
        answer.state = "skipped"
        answer.sentences.append(f"It cannot be trained on ({row.reason}): {words(row.reason)}.")
        return answer
    whole = _trajectory(connection, project, owner, now)
    if whole.state != "waiting" and last is None:
        answer.state, answer.reason = "skipped", whole.reason
        answer.sentences.append(
            f"The trainer decided about its trajectory {trajectory_id} before it came, or without "
            "it."
        )
    if whole.state not in ("used", "skipped") or last is None:
        answer.state = whole.state if last is None else answer.state
        answer.sentences += [s for s in whole.sentences if s not in answer.sentences]
    return answer


def _trajectory(connection: Connection, project: str, row: Row, now: float) -> Why:
    uses = _uses(connection, CompletionUse.trajectory_id == row["id"])
    state = "waiting" if row["state"] == "open" else str(row["state"])
    answer = Why(row["id"], "trajectory", row["policy"], state, row["reason"], uses=uses)
    policy = queries.policy(connection, project, row["policy"])
    if policy is None:
        answer.state = "not_trained"
        answer.sentences.append(f"{row['policy']} is not a policy, so nothing of it is trained on.")
        return answer
    if row["split"] == "eval":
        answer.state = "held_out"
        answer.sentences.append("It is split=eval: it is measured, and never trained on.")
        return answer
    answer.sentences += _told(connection, uses)
    if row["state"] == "open":
        answer.sentences += _waits(connection, project, policy, row, now)
    elif row["reason"] is not None and row["state"] == "used":
        answer.sentences.append(
            f"Its newest rewards were not used ({row['reason']}): {words(row['reason'])}."
        )
    elif row["reason"] is not None and not uses:
        answer.sentences.append(f"It was left out ({row['reason']}): {words(row['reason'])}.")
    return answer


def _waits(connection: Connection, project: str, policy: Row, row: Row, now: float) -> list[str]:
    if not row["alone"]:
        return [
            f"It is a sub-agent of {row['parent_id']} without a reward of its own, so it shares "
            f"that one's: it is decided about together with it; ask why {row['parent_id']}."
        ]
    told = []
    if row["settled_revision"] is not None:
        told.append(
            "Its rewards have come or changed since the trainer decided about it, so it waits "
            "once more, to be trained on with what that changes."
        )
    if not row["has_reward"]:
        told.append(
            "It has no reward yet, and does not wait for ever: post one to /v1/rewards against it "
            "or one of its completions."
        )
    group = (
        connection.execute(
            select(Group.__table__).where(
                Group.project == project,
                Group.policy == policy["name"],
                Group.id == row["group_id"],
            )
        )
        .mappings()
        .one_or_none()
    )
    if group is None:
        return told
    return told + _group_waits(connection, project, policy, dict(group), now)


def _members(connection: Connection, group: Row) -> list[Row]:
    query = (
        select(*_COLUMNS)
        .where(
            Trajectory.project == group["project"],
            Trajectory.policy == group["policy"],
            Trajectory.group_id == group["id"],
        )
        .order_by(Trajectory.created_at, Trajectory.id)
        .limit(_MEMBERS)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def _group_waits(
    connection: Connection, project: str, policy: Row, group: Row, now: float
) -> list[str]:
    """What a group with waiting members waits for."""
    try:
        settings = PolicySettings.model_validate(policy["settings"])
    except ValidationError as error:
        found = "; ".join(each["msg"] for each in error.errors())
        return [f"Nothing is trained while the settings of {policy['name']} are wrong: {found}."]
    told = []
    if policy["state"] == "paused":
        because = f", because {policy['state_reason']}" if policy["state_reason"] else ""
        told.append(
            f"The policy is paused{because}: `strop policy resume {policy['name']}` goes on."
        )
    if policy["canary"] is not None:
        told.append(
            f"{policy['name']}@{policy['canary']} is on trial; training goes on when that is "
            "decided."
        )
    if group["lease_owner"] is not None and group["lease_expires"] > now:
        running = _running(connection, project, policy["name"], group["lease_owner"])
        doing = f"step {running} is being taken on it" if running else "it is looked at"
        left = span(group["lease_expires"] - now)
        return [
            *told,
            f"A trainer ({group['lease_owner']}) holds its group, and {doing}; if "
            f"that dies, the group is free again in {left}.",
        ]
    waiting = [
        member
        for member in _members(connection, group)
        if member["state"] == "open" and member["split"] == "train" and member["alone"]
    ]
    fresh = [member for member in waiting if member["settled_revision"] is None]
    if group["choices"] is None:
        needed, what, by = settings.group_size, "members", " (group_size)"
        rewarded = sum(bool(member["has_reward"]) for member in fresh)
        more = len(fresh) - rewarded
    else:
        needed, what, by = min(group["choices"], settings.group_size), "choices", ""
        rewarded = group["waiting"]
        more = group["choices"] - rewarded
    settled = max((m["updated_at"] for m in waiting), default=0.0) + settings.settle_seconds
    name = f"group {group['id']}"
    ready = rewarded >= needed or len(fresh) < len(waiting)
    if group["closed_at"] is not None and waiting:
        told.append(f"Its {name} is closed, so it waits for no more members.")
        ready = True
    elif fresh and not ready:
        age = now - min(member["created_at"] for member in fresh)
        left = settings.deadline_seconds - age
        told.append(
            f"Its {name} has {rewarded} of the {needed} rewarded {what} that make it "
            f"ready{by}; {more} more wait for a reward."
        )
        if left > 0:
            told.append(f"With fewer it is taken in {span(left)}, at its deadline.")
        elif rewarded:
            told.append("Its deadline is over, so it is taken with what it has.")
            ready = True
        else:
            told.append("Its deadline is over, and it is taken with its first reward.")
    if ready and settled > now:
        told.append(f"It is taken when nothing was added to it for {settings.settle_seconds:g} s.")
    elif ready:
        told.append(
            f"It is ready, and waits for a trainer, and for {settings.groups_per_step} ready "
            "groups to make a step (groups_per_step)."
        )
    return told


def _running(connection: Connection, project: str, policy: str, worker: str) -> int | None:
    return connection.execute(
        select(Step.id)
        .where(
            Step.project == project,
            Step.policy == policy,
            Step.worker == worker,
            Step.state == "running",
        )
        .order_by(Step.id.desc())
        .limit(1)
    ).scalar_one_or_none()


def _group(connection: Connection, project: str, group: Row, now: float) -> Why:
    members = _members(connection, group)
    states = [member["state"] for member in members if member["split"] == "train"]
    answer = Why(group["id"], "group", group["policy"], "waiting", None)
    answer.uses = _uses(connection, CompletionUse.trajectory_id.in_([m["id"] for m in members]))
    policy = queries.policy(connection, project, group["policy"])
    if policy is None:
        answer.state = "not_trained"
        answer.sentences.append(
            f"{group['policy']} is not a policy, so nothing of it is trained on."
        )
        return answer
    if not states:
        answer.state = "held_out"
        answer.sentences.append("All of it is split=eval: it is measured, and never trained on.")
        return answer
    counts = ", ".join(
        f"{states.count(state)} {said}"
        for state, said in (("used", "trained on"), ("skipped", "left out"), ("open", "waiting"))
        if state in states
    )
    answer.sentences.append(f"Of its {len(states)} trajectories: {counts}.")
    steps: dict[int, int] = {}
    for use in answer.uses:
        if use["reason"] is None:
            steps[use["step_id"]] = steps.get(use["step_id"], 0) + use["tokens"]
    for step, tokens in steps.items():
        answer.sentences.append(f"{_step(connection, step)} trained on {tokens} tokens of it.")
    reasons: dict[str, int] = {}
    for member in members:
        if member["reason"] is not None:
            reasons[member["reason"]] = reasons.get(member["reason"], 0) + 1
    for reason, count in reasons.items():
        answer.sentences.append(f"{count} left out ({reason}): {words(reason)}.")
    if "open" in states:
        answer.sentences += _group_waits(connection, project, policy, group, now)
    else:
        answer.state = "used" if "used" in states else "skipped"
        answer.reason = max(reasons, key=lambda name: reasons[name]) if reasons else None
    return answer


def _uses(connection: Connection, which: Any) -> list[Row]:
    query = select(CompletionUse.__table__).where(which).order_by(CompletionUse.row)
    return [dict(row) for row in connection.execute(query).mappings()]


def _told(connection: Connection, uses: Sequence[Row]) -> list[str]:
    """What the trainer made of answers, one sentence for each time and advantage."""
    told: list[str] = []
    for use in uses:
        if use["reason"] is not None:
            text = f"It was left out ({use['reason']}): {words(use['reason'])}."
        else:
            text = _trained(connection, use)
        if text not in told:
            told.append(text)
    return told


def _trained(connection: Connection, use: Row) -> str:
    text = f"{_step(connection, use['step_id'])} trained on {use['tokens']} tokens of "
    text += f"{use['completion_id']} with advantage {use['advantage']:+.4g}"
    if use["reward"] is not None and use["baseline"] is not None:
        text += f": it was worth {use['reward']:.4g}, compared with {use['baseline']:.4g}"
    if use["ratio"] is not None:
        text += f"; its tokens weighed {use['ratio']:.3g} on average"
    if use["revision"] > 1:
        text += f" (revision {use['revision']} of its rewards)"
    return text + "."


def _step(connection: Connection, step_id: int) -> str:
    row = connection.execute(
        select(Step.policy, Step.parent_version, Step.version).where(Step.id == step_id)
    ).one_or_none()
    if row is None:
        return f"Step {step_id}"
    return f"Step {step_id} ({row.policy}@{row.parent_version} → @{row.version})"
