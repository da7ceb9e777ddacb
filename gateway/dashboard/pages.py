"""The built-in page at `/`: what is served, how each version did, what waits and why."""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.responses import HTMLResponse

from gateway import __version__
from gateway.gateway import Gateway, gateway_of
from gateway.store import queries, statistics

router = APIRouter(include_in_schema=False)
Strop = Annotated[Gateway, Depends(gateway_of)]

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(),
    trim_blocks=True,
    lstrip_blocks=True,
)
# Everything is in the page itself: no script, and nothing from elsewhere.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


def _overview(gateway: Gateway) -> dict[str, Any]:
    with gateway.database.read() as connection:
        found = []
        for row in queries.policies(connection, gateway.project):
            rewards = statistics.rewards_by_version(connection, gateway.project, row["name"])
            by_version: dict[int, dict[str, statistics.VersionReward]] = {}
            for reward in rewards:
                by_version.setdefault(reward.version, {})[reward.split] = reward
            found.append(
                {
                    **row,
                    "versions": queries.versions(connection, gateway.project, row["name"])[::-1],
                    "rewards": by_version,
                    "top": max((abs(reward.mean) for reward in rewards), default=1.0) or 1.0,
                }
            )
        groups = queries.groups(connection, gateway.project, now=time.time(), limit=25)
    return {"policies": found, "groups": groups}


@router.get("/", response_class=HTMLResponse)
async def overview(gateway: Strop) -> HTMLResponse:
    """The page."""
    shown = await asyncio.to_thread(_overview, gateway)
    page = _TEMPLATES.get_template("overview.html").render(
        **shown,
        catalog=gateway.publisher.catalog,
        replicas=gateway.pool.replicas,
        version=__version__,
        now=time.time(),
    )
    return HTMLResponse(page, headers=_HEADERS)
