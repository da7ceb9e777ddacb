"""Templates, and the headers that every page is sent with."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse

from gateway import __version__
from gateway.dashboard import session

_FOLDER = Path(__file__).parent

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing inline, nothing from elsewhere: what a model wrote cannot run even if it got out."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


def _when(at: float | None) -> str:
    if at is None:
        return ""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ago(at: float | None) -> str:
    if at is None:
        return ""
    seconds = max(0.0, time.time() - at)
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def _number(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return _signed(f"{value:.4g}")
    return _signed(f"{value:,}") if isinstance(value, int) else str(value)


def _signed(shown: str) -> str:
    return f"\N{MINUS SIGN}{shown[1:]}" if shown.startswith("-") else shown


def _seconds(value: float | None) -> str:
    """A duration with its unit."""
    if value is None:
        return ""
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _decimals(value: Any, places: int) -> str:
    """A number under others: all have as many places, so that their points are in a line."""
    if not isinstance(value, int | float):
        return _number(value)
    shown = f"{value:,.{places}f}"
    if value and not float(shown.replace(",", "")):
        shown = f"{value:.1e}"
    return _signed(shown)


_METRICS = {
    "kl": "KL to the reference, nats",
    "entropy": "entropy, nats a token",
    "groups_taught_nothing": "share of groups that taught nothing",
    "staleness_mean": "staleness, versions (mean)",
    "staleness_max": "staleness, versions (most)",
    "reward_mean": "reward (mean)",
    "reward_std": "reward (standard deviation)",
    "grad_norm": "gradient norm",
    "tokens_seen": "tokens read",
    "tokens_trained": "tokens trained on",
}


def _metric(name: str) -> str:
    """What a metric of a step is called where people read it."""
    return _METRICS.get(name, name.replace("_", " "))


def _part(value: Any) -> str:
    return quote(str(value), safe="")


_TEMPLATES = Environment(
    loader=FileSystemLoader(_FOLDER / "templates"),
    autoescape=select_autoescape(),
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"when": _when, "ago": _ago, "number": _number, "part": _part}
_TEMPLATES.filters |= {"decimals": _decimals, "metric": _metric, "seconds": _seconds}


def page(request: Request, name: str, status: int = 200, **values: Any) -> HTMLResponse:
    """A page from its template."""
    text = _TEMPLATES.get_template(name).render(
        **values,
        who=session.visitor(request),
        version=__version__,
        path=request.url.path,
        query=request.url.query,
        address=str(request.base_url).rstrip("/"),
    )
    return HTMLResponse(text, status, headers=HEADERS)
