"""Charts as HTML: SVG for the drawing, which stretches to any width, with the text beside it, which does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from markupsafe import Markup

WIDTH, HEIGHT = 1000.0, 100.0  # of a drawing, in its own units


@dataclass(frozen=True)
class Curve:
    """A line of a chart: its values, and how it looks."""

    name: str
    values: Sequence[float]
    color: str
    thick: float
    dashes: str = ""


def legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """Return a legend of (name, color, look) entries. An empty look gives a line, otherwise a box of that CSS class."""
    marks = (
        f'<span><i class="{look}" style="border-color: {color}; --color: {color}"></i>{escape(name)}</span>'
        for name, color, look in entries
    )
    return Markup(f'<div class="legend">{"".join(marks)}</div>')


def curves(lines: Sequence[Curve], css: str = "") -> Markup:
    """Plot lines over the step number, on a logarithmic scale; values <= 0 are drawn at its lower end."""
    positive = [value for line in lines for value in line.values if value > 0] or [1.0]
    low, high = log10(min(positive)), log10(max(positive))
    ticks = _ticks(low, high)
    low, high = min(low, log10(ticks[0])), max(high, log10(ticks[-1]))
    span = (high - low) or 1.0
    steps = max(len(line.values) for line in lines)

    def y(value: float) -> float:
        return HEIGHT * (1 - ((log10(value) if value > 0 else low) - low) / span)

    def x(step: int) -> float:
        return WIDTH * step / max(1, steps - 1)

    grid = "".join(f'<line class="grid" x1="0" x2="{WIDTH:g}" y1="{y(t):.2f}" y2="{y(t):.2f}"/>' for t in ticks)
    drawn = "".join(_path(line, [(x(step), y(value)) for step, value in enumerate(line.values)]) for line in lines)
    at_y = "".join(f'<span style="top: {y(t) / HEIGHT:.2%}">{_short(t)}</span>' for t in ticks)
    at_x = "".join(f'<span style="left: {x(s) / WIDTH:.2%}">{s + 1}</span>' for s in _steps(steps))
    return Markup(
        f'<div class="plot"><div class="y">{at_y}</div><div class="area {css}"><svg preserveAspectRatio="none" '
        f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}">{grid}{drawn}</svg></div><div class="x">{at_x}</div></div>'
    )


def _path(line: Curve, points: Sequence[tuple[float, float]]) -> str:
    to = " L".join(f"{x:.1f} {y:.2f}" for x, y in points)
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    return (
        f'<path class="curve" d="M{to}" stroke-width="{line.thick}" style="stroke: {line.color}"{dashes}>'
        f"<title>{escape(line.name)}</title></path>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers around the range from 10**low to 10**high: powers of ten, if few with steps between them."""
    powers = range(floor(low), ceil(high) + 1)
    steps = (1, 2, 5) if len(powers) <= 3 else (1,)
    numbers = [step * 10.0**power for power in powers for step in steps]
    below = [number for number in numbers if log10(number) <= low + 1e-9]
    above = [number for number in numbers if log10(number) >= high - 1e-9]
    return [number for number in numbers if max(below) <= number <= min(above)]


def _steps(steps: int) -> list[int]:
    between = max(1, round(steps / 6))
    chosen = list(range(0, steps, between))
    return [step for step in chosen if steps - 1 - step >= between] + [steps - 1]


def _short(number: float) -> str:
    return f"{number:g}" if 1e-4 <= number < 1e4 else f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e")


def bars(rows: Sequence[tuple[str, float, str, str]]) -> Markup:
    """Return a bar chart of (name, value, label, color) rows, on one scale from zero."""
    longest = max(number for _, number, _, _ in rows) or 1.0
    cells = (
        f'<span>{escape(name)}</span><div><i style="width: {number / longest:.2%}; background: {color}"></i></div>'
        f'<span class="num">{escape(words)}</span>'
        for name, number, words, color in rows
    )
    return Markup(f'<div class="bars">{"".join(cells)}</div>')


def stacked(parts: Sequence[tuple[str, float, str]], whole: float | None = None) -> Markup:
    """Return one bar of (name, value, color) parts; if they add up to less than `whole`, the rest stays empty."""
    total = whole or sum(number for _, number, _ in parts) or 1.0
    cells = (
        f'<i style="width: {number / total:.3%}; background: {color}" title="{escape(name)}"></i>'
        for name, number, color in parts
    )
    return Markup(f'<div class="stacked">{"".join(cells)}</div>')
