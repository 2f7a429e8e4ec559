"""A stacked area chart over a sequence of events, with strips of names below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from markupsafe import Markup

from .charts import HEIGHT, WIDTH


@dataclass(frozen=True)
class Point:
    """One event: the values of the stacked parts, and the names of its segments in the two strips below."""

    values: Sequence[float]
    group: str
    band: str
    words: str  # the tooltip


def areas(
    points: Sequence[Point], parts: Sequence[tuple[str, str]], words: Callable[[float], str],
    limit: tuple[float, str] | None = None,
) -> Markup:  # fmt: skip
    """Draw the chart.

    `parts` are (name, color) from the bottom up. `words` formats the labels of the axis. `limit` (value, label) is a
    line, which is left out if it is far above what is drawn.
    """
    highest = max(sum(point.values) for point in points) or 1.0
    ticks = _ticks(highest)
    shows_limit = limit is not None and limit[0] <= 2.5 * highest
    top = max(ticks[-1], highest, limit[0] * 1.05 if limit is not None and shows_limit else 0.0)

    def y(value: float) -> float:
        return HEIGHT * (1 - value / top)

    grid = "".join(f'<line class="grid" x1="0" x2="{WIDTH:g}" y1="{y(t):.2f}" y2="{y(t):.2f}"/>' for t in ticks)
    drawn = "".join(_area(points, number, name, color, y) for number, (name, color) in enumerate(parts))
    line = "" if limit is None or not shows_limit else (
        f'<line class="limit" x1="0" x2="{WIDTH:g}" y1="{y(limit[0]):.2f}" y2="{y(limit[0]):.2f}"/>'
    )  # fmt: skip
    said = "" if limit is None or not shows_limit else (
        f'<span class="limit" style="top: {y(limit[0]) / HEIGHT:.2%}">{escape(limit[1])}</span>'
    )  # fmt: skip
    step = WIDTH / len(points)
    pointed = "".join(
        f'<rect class="point" x="{at * step:.2f}" y="0" width="{step:.2f}" height="{HEIGHT:g}">'
        f"<title>{escape(point.words)}</title></rect>"
        for at, point in enumerate(points)
    )
    at_y = "".join(f'<span style="top: {y(t) / HEIGHT:.2%}">{escape(words(t))}</span>' for t in ticks)
    return Markup(
        f'<div class="plot marked"><div class="y">{at_y}</div><div class="area tall">{_marker(points, y)}'
        f'<svg preserveAspectRatio="none" viewBox="0 0 {WIDTH:g} {HEIGHT:g}">{grid}{drawn}{line}{pointed}</svg>{said}'
        f"</div>{_strip(points, 'strip', lambda point: point.group)}"
        f"{_strip(points, 'strip bands', lambda point: point.band)}</div>"
    )


def _area(points: Sequence[Point], number: int, name: str, color: str, y: Callable[[float], float]) -> str:
    """Draw one part; nothing if it is 0 everywhere."""
    step = WIDTH / len(points)
    above = [(at, y(sum(point.values[: number + 1]))) for at, point in enumerate(points)]
    below = [(at, y(sum(point.values[:number]))) for at, point in enumerate(points)]
    if all(abs(a - b) < 1e-9 for (_, a), (_, b) in zip(above, below, strict=True)):
        return ""
    edge = [f"{x:.2f} {height:.2f}" for at, height in above for x in (at * step, (at + 1) * step)]
    back = [f"{x:.2f} {height:.2f}" for at, height in reversed(below) for x in ((at + 1) * step, at * step)]
    return f'<path d="M{" L".join(edge + back)}Z" style="fill: {color}"><title>{escape(name)}</title></path>'


def _marker(points: Sequence[Point], y: Callable[[float], float]) -> str:
    """Label the highest point with the first line of its tooltip."""
    at = max(range(len(points)), key=lambda number: sum(points[number].values))
    left, top = (at + 0.5) / len(points), y(sum(points[at].values)) / HEIGHT
    side = "right" if left > 0.5 else "left"
    first = escape(points[at].words.splitlines()[0])
    return f'<span class="peak {side}" style="left: {left:.2%}; top: {top:.2%}"><b>{first}</b></span>'


def _strip(points: Sequence[Point], css: str, key: Callable[[Point], str]) -> str:
    """Draw a strip of names: neighbouring points with the same `key` share a cell."""
    cells = []
    for name, members in groupby(points, key=key):
        count = len(list(members))
        said = name if count >= len(points) * 0.012 * min(len(name), 5) else ""  # else only as a tooltip
        cells.append(f'<span style="flex: {count} 0 0" title="{escape(name)}">{escape(said)}&#8203;</span>')
    return f'<div class="{css}">{"".join(cells)}</div>'


def _ticks(highest: float) -> list[float]:
    """Return three to six round numbers, from zero up to `highest`."""
    unit = 1.0
    while unit * 10 <= highest:
        unit *= 10
    while unit > highest:
        unit /= 10
    step = next(unit * factor for factor in (0.2, 0.5, 1, 2) if highest / (unit * factor) <= 5.5)
    return [step * number for number in range(int(highest / step) + 1)]
