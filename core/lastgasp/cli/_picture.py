"""The timeline of one incident as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgasp.errors import MissingExtra
from lastgasp.events import Fault, Incident

from ._timeline import Scale, Span, duration, headline, moments, rung, shown, spans

_COLOURS = {
    "notice": "#d1495b",
    "agree": "#edae49",
    "write": "#00798c",
    "commit": "#66a182",
    "restart": "#8d96a3",
}
_INK, _FAINT = "#2e4057", "#d9dde2"
_LANES = 8
"""Ranks that get a lane of their own; of a larger job those that matter."""


def draw(incident: Incident, target: Path) -> None:
    """Write the picture to `target`, as PNG whatever its name.

    Raises:
        MissingExtra: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("matplotlib", "cli") from None
    ranks = shown_ranks(incident)
    figure = Figure(figsize=(12, 3.6 + 0.42 * len(ranks)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    parts = spans(incident.phases, bool(incident.rung))
    scale = Scale(parts)
    _phase_bar(axes, parts, scale)
    _moment_labels(axes, incident, scale)
    for row, rank in enumerate(ranks):
        _lane(axes, incident, scale, rank, -2.1 - row)
    _frame(axes, incident, scale, len(ranks))
    figure.savefig(target, format="png")


def shown_ranks(incident: Incident) -> list[int]:
    """All ranks of a small job; of a large one those that failed, saved, or were not used, then the lowest."""
    if incident.world_size <= _LANES:
        return list(range(incident.world_size))
    told = [*(f.rank for f in incident.faults), *incident.savers, *(u.rank for u in incident.unused)]
    return sorted(list(dict.fromkeys([*told, *range(_LANES)]))[:_LANES])


def _phase_bar(axes: Any, parts: list[Span], scale: Scale) -> None:
    for part, left, right in zip(parts, scale.edges, scale.edges[1:], strict=False):
        axes.barh(0, right - left, left=left, height=0.9, color=_COLOURS[part.group], edgecolor="white", linewidth=1.5)
        text = part.activity.replace(", ", ",\n")
        centre = (left + right) / 2
        axes.text(centre, 0.66, text, ha="center", va="bottom", color=_INK, fontsize=9)
        axes.text(centre, 0, duration(part.ms), ha="center", va="center", color="white", fontsize=9, weight="bold")


def _moment_labels(axes: Any, incident: Incident, scale: Scale) -> None:
    for moment, place in zip(moments(incident.phases), scale.edges, strict=False):
        axes.plot([place, place], [-0.45, -0.6], color=_INK, linewidth=1)
        text = f"{shown(moment.phase, incident)}\n+{duration(moment.at_ms)}"
        axes.text(place, -0.66, text, ha="center", va="top", color=_INK, fontsize=8, parse_math=False)


def _lane(axes: Any, incident: Incident, scale: Scale, rank: int, height: float) -> None:
    """One rank: when it was alive, what it suffered, and when it wrote."""
    at = {moment.phase: moment.at_ms for moment in moments(incident.phases)}
    fault = next((f for f in incident.faults if f.rank == rank), None)
    gone = fault is not None and fault.kind in ("killed", "lost")
    axes.plot([0, 0 if gone else scale.end], [height, height], color=_FAINT, linewidth=6, solid_capstyle="butt")
    if gone and "restarted" in at:
        back = scale.place(at["restarted"])
        axes.plot([back, scale.end], [height, height], color=_FAINT, linewidth=6, solid_capstyle="butt")
    axes.text(-0.18, height, f"rank {rank}", ha="right", va="center", color=_INK, fontsize=9)
    words = []
    if fault is not None:
        _fault_mark(axes, incident, fault, scale, height)
        words.append(f"{fault.kind}: {_short(fault.cause)}")
    if rank in incident.savers and "first_byte" in at:
        begin, end = scale.place(at["first_byte"]), scale.place(at.get("saved", at["first_byte"]))
        axes.plot([begin, end], [height, height], color=_COLOURS["write"], linewidth=10, solid_capstyle="butt")
        size = f", {incident.nbytes / 1e6:,.1f} MB" if incident.nbytes else ""
        words.append(f"saved step {incident.step_saved}{size}")
    words += [f"not used: {_short(u.why)}" for u in incident.unused if u.rank == rank and fault is None]
    axes.text(0.18, height + 0.2, "; ".join(words), ha="left", va="bottom", color=_INK, fontsize=8, parse_math=False)


def _fault_mark(axes: Any, incident: Incident, fault: Fault, scale: Scale, height: float) -> None:
    """A cross where it failed; a ring where it only saw a collective of others fail."""
    if fault.kind != "peer":
        axes.plot(0, height, marker="X", markersize=11, color=_COLOURS["notice"], markeredgecolor="white")
        return
    zero = incident.phases.fault or incident.phases.detected or fault.seen_ns
    seen = scale.place((fault.seen_ns - zero) / 1e6)
    axes.plot(seen, height, marker="o", markersize=9, color="white", markeredgecolor=_COLOURS["notice"])


def _short(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 90 else line[:89] + "…"


def _frame(axes: Any, incident: Incident, scale: Scale, lanes: int) -> None:
    axes.set_title(headline(incident), loc="left", color=_INK, fontsize=13, weight="bold", pad=22, parse_math=False)
    number = f"attempt {incident.attempt}" + (f", incarnation {incident.incarnation}" if incident.incarnation else "")
    detail = f"incident {incident.id}   {number}   led by {incident.led_by or 'unknown'}   {_short(rung(incident))}"
    axes.text(0, 1.02, detail, transform=axes.transAxes, fontsize=9, color=_INK, parse_math=False)
    note = "Widths grow with the logarithm of the duration."
    axes.text(1, -0.01, note, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=_COLOURS["restart"])
    axes.set_xlim(-1.1, max(scale.end, 1.0) + 0.6)
    axes.set_ylim(-2.3 - lanes, 1.6)
    axes.axis("off")
