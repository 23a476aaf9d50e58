"""The report on a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .summary import RankRow, Report
from .words import conclusion, headline, ms, percent

_COLUMNS = ("p50", "p90", "p99", "data", "forward", "backward", "optimizer", "save", "rest")


def render(report: Report) -> RenderableType:
    """Table of ranks, who is slow with evidence, notes."""
    parts: list[RenderableType] = [_ranks(report), ""]
    verdict = report.verdict
    style = "bold red" if verdict.slow else "bold green" if verdict.steps else "bold yellow"
    parts.append(f"[{style}]{escape(conclusion(verdict, len(report.ranks)))}[/]")
    for slow in verdict.slow:
        parts.append(f"[bold]{escape(headline(slow))}[/]  (cause {slow.cause}, confidence {slow.confidence:.2f})")
        parts += [f"  - {escape(text)}" for text in slow.evidence]
    parts += [f"note: {escape(text)}" for text in (*verdict.notes, *verdict.unjudged, *report.remarks)]
    return Group(*parts)


def _ranks(report: Report) -> Table:
    title = f"{escape(report.task)}: time of a step per rank, and what it is spent on"
    table = Table(title=title, title_justify="left")
    hosts = any(row.host for row in report.ranks)
    communication = any(row.share is not None and row.share.communication for row in report.ranks)
    dropped = any(row.dropped for row in report.ranks)
    extra = [name for name, shown in (("in collectives", communication), ("dropped", dropped)) if shown]
    for name in ("rank", *(["host"] if hosts else []), "steps", *_COLUMNS, *extra):
        table.add_column(name, justify="left" if name == "host" else "right", no_wrap=True)
    slow = {item.rank: item.cause for item in report.verdict.slow}
    for row in report.ranks:
        cells = [str(row.rank), *([escape(row.host)] if hosts else []), f"{row.steps:,}", *_cells(row)]
        if communication:
            cells.append(percent(row.share.communication) if row.share else "")
        if dropped:
            cells.append(f"{row.dropped:,}")
        table.add_row(*cells, style="red" if row.rank in slow else None)
    return table


def _cells(row: RankRow) -> list[str]:
    if row.step_s is None or row.share is None:
        return [""] * len(_COLUMNS)
    times = [ms(value) for value in (row.step_s.p50, row.step_s.p90, row.step_s.p99)]
    share = row.share
    return times + [
        percent(value) for value in (share.data, share.forward, share.backward, share.optimizer, share.save, share.rest)
    ]
