"""Plots as SVG text: no library, no network, colours from the page's style so that light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .phrasing import percent

WIDTH, LEFT, RIGHT = 960, 64, 76
INNER = WIDTH - LEFT - RIGHT


@dataclass(frozen=True)
class Line:
    """One rank's line.

    Attributes:
        name: shown when the pointer rests on it, and at its end if it is marked.
        points: x (step) and y (seconds).
        marked: a slow rank: drawn on top, in the colour of warning.
    """

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


def lines(lines: Sequence[Line], top: float, height: int = 260) -> str:
    """Lines over steps; y from 0 to `top` seconds, or a little more for round ticks."""
    xs = [x for line in lines for x, _ in line.points]
    if not xs or top <= 0:
        return ""
    low, high = min(xs), max(max(xs), min(xs) + 1)
    inner, tick = height - 40, _tick(top / 5)
    top = tick * math.ceil(top / tick - 1e-9)

    def at(x: float, y: float) -> str:
        return f"{LEFT + (x - low) / (high - low) * INNER:.1f},{10 + inner * (1 - min(y, top) / top):.1f}"

    parts = [_y_axis(top, tick, inner), *_x_axis(low, high, height)]
    for line in sorted(lines, key=lambda item: item.marked):
        kind = "line marked" if line.marked else "line"
        points = " ".join(at(x, y) for x, y in line.points)
        parts.append(f'<polyline class="{kind}" points="{points}"><title>{escape(line.name)}</title></polyline>')
        if line.marked:
            x, y = at(*line.points[-1]).split(",")
            parts.append(f'<text class="name" x="{float(x) + 6:.1f}" y="{float(y) + 4:.1f}">{escape(line.name)}</text>')
    return _svg(height, "Time of a step over the steps, a line per rank", parts)


def _tick(least: float) -> float:
    """The next of 1, 2, 5, 10 ... from `least` on."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _y_axis(top: float, tick: float, inner: int) -> str:
    parts = []
    for number in range(round(top / tick) + 1):
        y = 10 + inner * (1 - number * tick / top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + INNER}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{number * tick * 1e3:g} ms" if top < 1 else f"{number * tick:g} s"
        parts.append(f'<text class="tick end" x="{LEFT - 8}" y="{y + 4:.1f}">{label if number else 0}</text>')
    return "".join(parts)


def _x_axis(low: float, high: float, height: int) -> list[str]:
    parts = []
    for part in (0, 0.25, 0.5, 0.75, 1):
        step = round(low + part * (high - low))
        label = f"step {step:,}" if part == 0 else f"{step:,}"
        parts.append(f'<text class="tick mid" x="{LEFT + part * INNER:.1f}" y="{height - 8}">{label}</text>')
    return parts


BAR, GAP = 18, 8


def bars(rows: Mapping[str, Mapping[str, float]], marked: Sequence[str]) -> str:
    """A bar per rank of the shares of its time; classes `p-NAME` give the colours."""
    parts = []
    for place, (name, shares) in enumerate(rows.items()):
        y, x = place * (BAR + GAP) + 4, float(LEFT)
        kind = "tick end strong" if name in marked else "tick end"
        parts.append(f'<text class="{kind}" x="{LEFT - 8}" y="{y + 13}">{escape(name)}</text>')
        for phase, share in shares.items():
            width = share * (WIDTH - LEFT - 16)
            if width >= 0.5:
                title = f"<title>{escape(name)}: {phase} {percent(share)}</title>"
                parts.append(
                    f'<rect class="p-{phase}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}">{title}</rect>'
                )
                if width > 44:
                    parts.append(f'<text class="in" x="{x + 5:.1f}" y="{y + 13}">{percent(share)}</text>')
            x += width
    return _svg(len(rows) * (BAR + GAP) + 8, "What the time of a step is spent on, a bar per rank", parts)


def legend(phases: Sequence[str]) -> str:
    """Squares with names, as HTML."""
    squares = (f'<span><i class="p-{phase}"></i>{phase}</span>' for phase in phases)
    return f'<p class="legend">{"".join(squares)}</p>'


def heat(rows: Mapping[str, Sequence[float]], steps: Sequence[int], marked: Sequence[str], full: float) -> str:
    """A stripe per rank: where it takes longer than the others (warm) or less long (cold), as shares of a step.

    Args:
        rows: name -> values.
        steps: the first step of each column.
        marked: names of slow ranks.
        full: the share that has the full colour.
    """
    columns = len(steps)
    if not columns:
        return ""
    width, tall = INNER / columns, 16 if len(rows) <= 32 else 8
    parts = []
    for place, (name, row) in enumerate(rows.items()):
        y = place * (tall + 2) + 4
        kind = "tick end strong" if name in marked else "tick end"
        if tall == 16 or name in marked:
            parts.append(f'<text class="{kind}" x="{LEFT - 8}" y="{y + tall - 4}">{escape(name)}</text>')
        parts.append(f'<rect class="empty" x="{LEFT}" y="{y}" width="{INNER}" height="{tall}"/>')
        for at, value in enumerate(row):
            if abs(value) >= 0.03:
                parts.append(
                    f'<rect class="{"hot" if value > 0 else "cold"}" x="{LEFT + at * width:.1f}" y="{y}" '
                    f'width="{width + 0.3:.1f}" height="{tall}" fill-opacity="{min(1.0, abs(value) / full):.2f}">'
                    f"<title>{escape(name)}, from step {steps[at]:,}: {value * 100:+.0f} %</title></rect>"
                )
    height = len(rows) * (tall + 2) + 30
    return _svg(
        height,
        "Longer or less long than the other ranks, a stripe per rank",
        [*parts, *_x_axis(steps[0], steps[-1], height)],
    )


def _svg(height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {WIDTH} {height}" '
        f'preserveAspectRatio="xMidYMid meet">{"".join(parts)}</svg>'
    )
