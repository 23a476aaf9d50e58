"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from .phrasing import conclusion, headline
from .summary import RankRow, Report

_SHARES = {"data": "data", "forward": "fwd", "backward": "bwd", "optimizer": "opt", "save": "save", "rest": "rest"}
"""Share -> heading."""
HOST_MAX = 12
"""Characters."""
SECONDS_FROM = 10.0
"""Seconds of a step from which on times are shown in seconds: milliseconds would be too long for a column."""


def render(report: Report) -> RenderableType:
    """Table of ranks, slow ranks with evidence, notes; fits into 80 columns."""
    shown = _SHARES | ({"communication": "coll"} if _communicates(report) else {})
    unit, factor = _unit(report)
    parts: list[RenderableType] = [
        f"[bold]{escape(report.task)}[/]: {unit} per step, and % of the time by what it is spent on",
        _ranks(report, shown, factor),
        "fwd, bwd, opt: forward, backward, optimizer"
        + ("; coll: in collectives, within the others" if len(shown) > len(_SHARES) else ""),
        "",
    ]
    verdict = report.verdict
    style = "bold red" if verdict.slow else "bold green" if verdict.judged else "bold yellow"
    parts.append(f"[{style}]{escape(conclusion(verdict, len(report.ranks)))}[/]")
    for slow in verdict.slow:
        parts.append(f"[bold]{escape(headline(slow))}[/]  (cause {slow.cause}, confidence {slow.confidence:.2f})")
        parts += [Padding(escape(text), (0, 0, 0, 2)) for text in slow.evidence]
    parts += [f"note: {escape(text)}" for text in (*verdict.notes, *verdict.unjudged, *report.remarks)]
    return Group(*parts)


def _ranks(report: Report, shares: Mapping[str, str], factor: float) -> Table:
    hosts = any(row.host for row in report.ranks)
    gap = 1 if hosts and len(shares) > len(_SHARES) else 2
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    dropped = any(row.dropped for row in report.ranks)
    table.add_column("rank", justify="right", no_wrap=True)
    if hosts:
        table.add_column("host", no_wrap=True)
    for name in ("steps", "p50", "p90", "p99", *shares.values(), *(["dropped"] if dropped else [])):
        table.add_column(name, justify="right", no_wrap=True)
    slow = {item.rank for item in report.verdict.slow}
    for row in report.ranks:
        cells = [str(row.rank), *([escape(_host(row.host))] if hosts else []), f"{row.steps:,}"]
        cells += [*_cells(row, factor, shares), *([f"{row.dropped:,}"] if dropped else [])]
        table.add_row(*cells, style="red" if row.rank in slow else None)
    return table


def _communicates(report: Report) -> bool:
    return any(row.share is not None and row.share.communication for row in report.ranks)


def _host(name: str) -> str:
    """Its end where it is long: that is where the names of a cluster differ."""
    return name if len(name) <= HOST_MAX else f"…{name[1 - HOST_MAX :]}"


def _unit(report: Report) -> tuple[str, float]:
    longest = max((row.step_s.p50 for row in report.ranks if row.step_s is not None), default=0.0)
    return ("s", 1.0) if longest >= SECONDS_FROM else ("ms", 1e3)


def _cells(row: RankRow, factor: float, shares: Mapping[str, str]) -> list[str]:
    if row.step_s is None or row.share is None:
        return [""] * (3 + len(shares))
    times = [_short(value * factor) for value in (row.step_s.p50, row.step_s.p90, row.step_s.p99)]
    parts = [100 * getattr(row.share, name) for name in shares]
    return times + [f"{part:.{0 if part >= 9.95 or part == 0 else 1}f}" for part in parts]


def _short(value: float) -> str:
    """Three digits or so: `1,204`, `60.2`, `0.81`."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 1 else 2}f}"
