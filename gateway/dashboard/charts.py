"""Charts as SVG, made on the server: no library, no script, and no inline style.

Colours are classes of the style sheet, so that light and dark follow it. Each chart has a title
that says in words what it shows; the numbers stand in a table beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from markupsafe import Markup

_WIDTH, _HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 26


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a place, with half the width of its interval where that is known."""

    x: float
    y: float
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points under one name; `kind` is the class that gives it its colour."""

    name: str
    kind: str
    points: Sequence[Point]


def lines(title: str, series: Sequence[Series], x_name: str, mark: float | None = None) -> Markup:
    """A line chart.

    Args:
        x_name: what stands below, such as `version`.
        mark: an x that is marked by a vertical line, such as the version that is served.
    """
    shown = [one for one in series if one.points]
    if not shown:
        return Markup("")
    points = [point for one in shown for point in one.points]
    marked = [mark] if mark is not None else []
    x_low, x_high = _span([*marked, *(p.x for p in points)], 0.5)
    reach = [p.y + sign * (p.error or 0.0) for p in points for sign in (-1, 1)]
    y_low, y_high = _span(reach, 0.05)
    ticks = _ticks(y_low, y_high)

    def x_of(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_open(title, _HEIGHT)]
    for tick in ticks:
        y = y_of(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.1f}">{tick:g}</text>')
    for x in _x_ticks(points):
        parts.append(f'<text class="tick mid" x="{x_of(x):.1f}" y="{_HEIGHT - 8}">{x:g}</text>')
    parts.append(f'<text class="tick axis" x="2" y="{_HEIGHT - 8}">{escape(x_name)}</text>')
    if mark is not None:
        parts.append(
            f'<line class="mark" x1="{x_of(mark):.1f}" x2="{x_of(mark):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"/>'
        )
    for one in shown:
        ordered = sorted(one.points, key=lambda p: p.x)
        for a, b in pairwise(ordered):
            parts.append(
                f'<line class="line {one.kind}" x1="{x_of(a.x):.1f}" y1="{y_of(a.y):.1f}" '
                f'x2="{x_of(b.x):.1f}" y2="{y_of(b.y):.1f}"/>'
            )
        for p in ordered:
            if p.error:
                parts.append(
                    f'<line class="error {one.kind}" x1="{x_of(p.x):.1f}" x2="{x_of(p.x):.1f}" '
                    f'y1="{y_of(p.y - p.error):.1f}" y2="{y_of(p.y + p.error):.1f}"/>'
                )
            words = f"{one.name}, {x_name} {p.x:g}: {p.y:.4g}"
            if p.error:
                words += f" ± {p.error:.2g}"
            parts.append(
                f'<circle class="dot {one.kind}" cx="{x_of(p.x):.1f}" cy="{y_of(p.y):.1f}" r="3.5">'
                f"<title>{escape(words)}</title></circle>"
            )
    return Markup("".join([*parts, "</svg>"]))


def phases(title: str, seconds: dict[str, float]) -> Markup:
    """How the time of a step was spent: one bar a phase."""
    if not seconds:
        return Markup("")
    longest = max(seconds.values()) or 1.0
    height = 26 * len(seconds) + 6
    parts = [_open(title, height)]
    for row, (name, value) in enumerate(seconds.items()):
        y = 26 * row + 6
        width = max(1.0, value / longest * (_WIDTH - 260))
        parts.append(f'<text class="label" x="0" y="{y + 14}">{escape(name)}</text>')
        parts.append(f'<rect class="bar train" x="150" y="{y}" width="{width:.1f}" height="18"/>')
        parts.append(f'<text class="label" x="{158 + width:.1f}" y="{y + 14}">{value:.2f} s</text>')
    return Markup("".join([*parts, "</svg>"]))


def bars(title: str, counts: Sequence[int]) -> Markup:
    """Counts of minutes, the one that runs at the right; the ends of both axes are named."""
    if not counts or not any(counts):
        return Markup("")
    width, height, top = 1080, 130, max(counts)
    floor = height - _BOTTOM
    step = (width - _LEFT - _RIGHT) / len(counts)
    parts = [_open(title, height, width, "band")]
    for value in sorted({0, top}):
        y = floor - value / top * (floor - _TOP)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.1f}">{value:,}</text>'
        )
    for index, count in enumerate(counts):
        tall = count / top * (floor - _TOP)
        past = len(counts) - 1 - index
        parts.append(
            f'<rect class="bar train" x="{_LEFT + index * step + 1:.1f}" y="{floor - tall:.1f}" '
            f'width="{step - 2:.1f}" height="{tall:.1f}">'
            f"<title>{count:,}, {f'{past} min ago' if past else 'this minute'}</title></rect>"
        )
        if past % 15 == 0 and past:
            x = _LEFT + (index + 0.5) * step
            parts.append(
                f'<text class="tick mid{" part" if past != 30 else ""}" x="{x:.1f}" '
                f'y="{height - 8}">{past} min ago</text>'
            )
    parts.append(f'<text class="tick end" x="{width - _RIGHT}" y="{height - 8}">now</text>')
    return Markup("".join([*parts, "</svg>"]))


def _open(title: str, height: int, width: int = _WIDTH, kind: str = "") -> str:
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" preserveAspectRatio="xMidYMid meet">'
    )


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or margin
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between the ends."""
    raw = (high - low) / 4
    power = 10.0 ** int(f"{raw:e}".split("e")[1])
    size = next(power * n for n in (1, 2, 5, 10) if power * n >= raw)
    first = int(low / size) - 1
    found = [round((first + n) * size, 12) for n in range(12)]
    return [tick for tick in found if low <= tick <= high]


def _x_ticks(points: Sequence[Point]) -> list[float]:
    found = sorted({point.x for point in points})
    every = max(1, -(-len(found) // 12))
    return found[::every]
