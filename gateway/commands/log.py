"""`strop trajectory`, `strop group` and `strop reward`: the log, as people read it."""

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from gateway.commands.shared import (
    URL,
    AsJson,
    Url,
    ask,
    failed,
    listing,
    number,
    policy_names,
    right,
    show,
    when,
    words,
)

trajectory_app = typer.Typer(help="Episodes, turn by turn.")
group_app = typer.Typer(help="Trajectories of one task, compared with each other.")

OfPolicy = Annotated[
    str | None, typer.Option("--policy", help="Of this policy.", autocompletion=policy_names)
]

_COMPLETIONS = ("chatcmpl-", "cmpl-", "resp_", "msg_")
_ROLES = {"system": "magenta", "developer": "magenta", "user": "cyan", "tool": "yellow"}


def text_of(message: Any) -> str:
    """What a message says, its calls of tools among it."""
    if not isinstance(message, dict):
        return str(message)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        content = "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)
    text = str(content or "")
    if message.get("reasoning_content"):
        text = f"({message['reasoning_content']})\n{text}"
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        text += f"\n→ {function.get('name')}({function.get('arguments')})"
    return text.strip()


@trajectory_app.command("show")
def show_trajectory(
    trajectory: str,
    tokens: Annotated[bool, typer.Option(help="With --json: token ids and logprobs too.")] = False,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """An episode: what was said, what it was worth, and what became of it."""
    found = ask(url, f"/v1/trajectories/{quote(trajectory, safe='')}?tokens={str(tokens).lower()}")
    title = (
        f"[bold]{escape(found['id'])}[/] of {found['policy']}, group {escape(found['group_id'])}, "
        f"{found['split']}, {when(found['created_at'])}"
    )
    turns = _turns(found["completions"])
    show(found, as_json, title, fate(found), *turns, *_rewards(found))


def _turns(completions: list[dict[str, Any]]) -> Iterator[RenderableType]:
    shown = 0
    for place, turn in enumerate(completions, 1):
        for message in turn["messages"][shown:]:
            yield _said(message)
        strop = turn["strop"]
        for choice in (turn.get("choices") or [])[:8]:
            title = f"turn {place}  {strop['policy']}@{strop['version']}  {turn['id']}"
            yield Panel(escape(text_of(choice["message"])), title=title, border_style="green")
        if strop["reason"]:
            yield f"[yellow]  not trained on: {words(strop['reason'])}[/]"
        # What the next turn repeats is not shown again; a thread of its own is.
        following = completions[place : place + 1]
        repeats = following and following[0]["strop"]["parent_id"] == turn["id"]
        shown = len(turn["messages"]) + 1 if repeats else 0


def _said(message: Any) -> Panel:
    role = str(message.get("role", "?")) if isinstance(message, dict) else "?"
    return Panel(
        escape(text_of(message)), title=escape(role), border_style=_ROLES.get(role, "green")
    )


def fate(found: dict[str, Any]) -> str:
    """What became of a trajectory, in a sentence."""
    if found["state"] == "used":
        return f"Step {found['step_id']} trained on it."
    if found["state"] == "skipped":
        return f"It was left out: {words(found['reason'])}."
    if found["split"] == "eval":
        return "It is held out and never trained on."
    return "It waits." if found["rewards"] else "It waits for a reward."


def _rewards(found: dict[str, Any]) -> list[Table]:
    if not found["rewards"]:
        return []
    turns = {turn["id"]: f"turn {place}" for place, turn in enumerate(found["completions"], 1)}
    counts = {_meant(reward): reward["id"] for reward in found["rewards"]}
    table = listing(right("reward"), "name", "for", "source", "when", "comment")
    for reward in found["rewards"]:
        target = reward["completion_id"]
        choice = f", choice {reward['choice']}" if reward["choice"] is not None else ""
        corrected = counts[_meant(reward)] != reward["id"]
        value = number(reward["reward"])
        table.add_row(
            f"[dim strike]{value}[/]" if corrected else value,
            escape(reward["name"]),
            turns.get(target, target) + choice if target else "the whole",
            escape(reward["source"]),
            when(reward["created_at"]) + (" corrected" if corrected else ""),
            escape(reward["comment"] or ""),
        )
    return [table]


def _meant(reward: dict[str, Any]) -> tuple[Any, ...]:
    """What a reward is of: the last one of it counts."""
    return reward["completion_id"], reward["choice"], reward["name"]


@group_app.command("list")
def list_groups(
    policy: OfPolicy = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 25,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Groups, the most recently active first: what waits, and why something was left out."""
    of = f"&policy={quote(policy, safe='')}" if policy else ""
    answer = ask(url, f"/v1/groups?limit={limit}{of}")
    numbers = (right(name) for name in ("members", "rewarded", "used"))
    table = listing("group", "policy", "state", *numbers, "left out", "active")
    for group in answer["data"]:
        reasons = ", ".join(f"{words(why)} × {count}" for why, count in group["reasons"].items())
        table.add_row(
            escape(group["id"]),
            group["policy"],
            group["state"],
            *(str(group[key]) for key in ("trajectories", "rewarded", "used")),
            reasons,
            when(group["updated_at"]),
        )
    show(answer, as_json, table)


@group_app.command("show")
def show_group(
    group: str, policy: OfPolicy = None, url: Url = URL, as_json: AsJson = False
) -> None:
    """The members of a group side by side, those that were worth most first."""
    of = f"?policy={quote(policy, safe='')}" if policy else ""
    found = ask(url, f"/v1/groups/{quote(group, safe='')}{of}")
    closed = ", closed" if found["closed_at"] else ""
    title = f"[bold]{escape(found['id'])}[/] of {found['policy']}{closed}"
    numbers = (right(name) for name in ("version", "reward", "advantage"))
    table = listing("trajectory", *numbers, "state", "answer")
    for member in found["members"]:
        state = words(member["reason"]) or (
            f"step {member['step_id']}" if member["step_id"] else ""
        )
        table.add_row(
            escape(member["id"]),
            f"@{member['version']}" if member["version"] is not None else "",
            number(member["reward"]),
            number(member["advantage"]),
            f"{member['state']} {state}".strip(),
            escape(text_of(member["answer"] or {})[:400]),
        )
    more = [f"and {found['more']} more"] if found["more"] else []
    show(found, as_json, title, table, *more)


@group_app.command("close")
def close_group(
    group: str, policy: OfPolicy = None, url: Url = URL, as_json: AsJson = False
) -> None:
    """Nothing more will come: train on what has a reward."""
    of = f"?policy={quote(policy, safe='')}" if policy else ""
    answer = ask(url, f"/v1/groups/{quote(group, safe='')}/close{of}", {})
    show(answer, as_json, f"{escape(group)} is closed.")


def reward(
    target: Annotated[str, typer.Argument(help="Id of a completion or of a trajectory.")],
    value: Annotated[float, typer.Argument(help="What it was worth.")],
    name: Annotated[str, typer.Option(help="Name of the reward.")] = "reward",
    choice: Annotated[int | None, typer.Option(min=0, help="Which of `n` answers.")] = None,
    comment: Annotated[str | None, typer.Option(help="Why.")] = None,
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Post a reward against a completion or a trajectory."""
    is_completion = target.startswith(_COMPLETIONS)
    if choice is not None and not is_completion:
        raise failed("--choice goes with the id of a completion, which begins with chatcmpl-.")
    body = {
        "completion_id" if is_completion else "trajectory_id": target,
        "reward": value,
        "name": name,
        "comment": comment,
        **({"choice": choice} if choice is not None else {}),
    }
    answer = ask(url, "/v1/rewards", body)
    kept = "" if "id" in answer else " (the database is away; it is checked when that is back)"
    said = f"{answer.get('id', 'kept')}: {answer['reward']:g} for {escape(target)}{kept}"
    show(answer, as_json, said)
