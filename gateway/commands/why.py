"""`strop why`: what became of something, and what it waits for."""

from typing import Annotated
from urllib.parse import quote

import typer
from rich.markup import escape

from gateway.commands.shared import URL, AsJson, Url, ask, show

_COLOURS = {"used": "green", "waiting": "yellow"}


def why(
    id: Annotated[str, typer.Argument(help="Of a completion, a trajectory or a group.")],
    url: Url = URL,
    as_json: AsJson = False,
) -> None:
    """Why a completion, trajectory or group was trained on, or was not, or not yet."""
    answer = ask(url, f"/v1/why/{quote(id, safe='')}")
    shown = []
    for found in answer["data"]:
        colour = _COLOURS.get(found["state"], "red")
        state = found["state"].replace("_", " ")
        shown.append(
            f"{found['kind']} {escape(found['id'])} of {escape(found['policy'])}: "
            f"[{colour}]{state}[/]"
        )
        shown += [f"  {escape(sentence)}" for sentence in found["sentences"]]
    show(answer, as_json, *shown)
