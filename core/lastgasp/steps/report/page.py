"""The report as one HTML file that needs no network and no script."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from html import escape

from . import svg
from .job import Job, RankData
from .phrasing import conclusion, headline, ms, percent
from .robust_stats import median, quantile
from .sample import Blocks, Matrix, Sample
from .self_time import own_slowdown
from .summary import PHASES, RankRow, Report

LINES_MAX, POINTS = 64, 240
"""Ranks drawn as lines, and points of each."""
STRIPES_MAX, CELLS = 64, 6000
"""Ranks drawn as stripes, and cells of all together: 6000 make a file of half a MB."""
FULL_COLOUR = 0.25
"""Share of a step that has the full colour at least: noise stays pale."""


def render_page(report: Report, job: Job, found: Sequence[Sample], last: int | None = None) -> str:
    """Render the complete page.

    Args:
        report, job: the numbers, and where they come from.
        found: what the judge looked at.
        last: only so many of the newest steps.
    """
    style = importlib.resources.files(__package__).joinpath("page.css").read_text("utf-8")
    slow = sorted({item.rank for item in report.verdict.slow})
    title = escape(f"{report.task}: {conclusion(report.verdict, len(report.ranks))}")
    parts = [
        f"<h1>{escape(report.task)}</h1>",
        f'<p class="soft">{escape(report.directory)}, {len(report.ranks)} ranks, {report.nbytes / 1e6:,.1f} MB</p>',
        _verdict(report),
        _notes([*report.verdict.notes, *report.verdict.unjudged, *report.remarks]),
        "<h2>Time of a step</h2>",
        '<p class="soft">One line per rank: the median of neighbouring steps.</p>',
        _lines(job, slow, last),
        "<h2>What the time is spent on</h2>",
        _bars(report, slow),
        *_stripes(found, slow),
        "<h2>Ranks</h2>",
        _table(report.ranks, slow),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _verdict(report: Report) -> str:
    verdict = report.verdict
    parts = []
    for item in verdict.slow:
        evidence = "".join(f"<li>{escape(text)}</li>" for text in item.evidence)
        sure = f"cause: {item.cause}, confidence {item.confidence:.2f}"
        parts.append(
            f'<div class="verdict slow"><b>{escape(headline(item))}</b><p class="soft">{sure}</p>'
            f"<ul>{evidence}</ul></div>"
        )
    if not parts:
        kind = "verdict" if verdict.judged else "verdict open"
        parts.append(f'<div class="{kind}"><b>{escape(conclusion(verdict, len(report.ranks)))}</b></div>')
    return "".join(parts)


def _notes(notes: Sequence[str]) -> str:
    return "".join(f'<p class="soft">{escape(note[:1].upper() + note[1:])}.</p>' for note in notes)


def _lines(job: Job, slow: Sequence[int], last: int | None) -> str:
    with_steps = [data for data in job.ranks.values() if len(data.table)]
    order = sorted(with_steps, key=lambda data: (data.rank not in slow, data.rank))[:LINES_MAX]
    found = [svg.Line(f"rank {data.rank}", _points(data, last), data.rank in slow) for data in order]
    values = [y for line in found for _, y in line.points]
    plot = svg.lines(found, 1.15 * quantile(values, 0.99)) if values else '<p class="soft">No steps.</p>'
    left_out = len(with_steps) - len(order)
    return plot + (f'<p class="soft">{left_out} more ranks are not drawn.</p>' if left_out else "")


def _points(data: RankData, last: int | None) -> list[tuple[float, float]]:
    table = data.table
    first = max(0, len(table) - last) if last is not None else 0
    size = -(-(len(table) - first) // POINTS)
    times = table.times("time")
    return [(table.numbers[at], median(times[at : at + size])) for at in range(first, len(table), size)]


def _bars(report: Report, slow: Sequence[int]) -> str:
    phases = (*PHASES, "rest")
    rows = {
        f"rank {row.rank}": {phase: getattr(row.share, phase) for phase in phases}
        for row in sorted(report.ranks, key=lambda row: (row.rank not in slow, row.rank))[:STRIPES_MAX]
        if row.share is not None
    }
    ordered = dict(sorted(rows.items(), key=lambda item: int(item[0].split()[1])))
    return svg.legend(phases) + svg.bars(ordered, [f"rank {rank}" for rank in slow])


def _stripes(found: Sequence[Sample], slow: Sequence[int]) -> list[str]:
    parts: list[str] = []
    for sample in found:
        if len(sample.ranks) < 2 or not len(sample.own) or sample.usual <= 0:
            continue
        own = own_slowdown(sample.own)
        plots = [("Waiting for data", own["data"], sample.own), ("Computing", own["compute"], sample.own)]
        if sample.late is not None:
            plots.append(("Coming late to collectives", sample.late.columns["late"], sample.late))
        stripes = [(title, *_stripe(matrix, blocks, sample, slow)) for title, matrix, blocks in plots]
        values = [abs(value) for _, rows, _ in stripes for row in rows.values() for value in row]
        full = max(FULL_COLOUR, quantile(values, 0.98))
        names = [f"rank {rank}" for rank in slow]
        parts += [f"<h3>{title}</h3>{svg.heat(rows, steps, names, full)}" for title, rows, steps in stripes]
    key = (
        '<p class="legend"><span><i class="k-hot"></i>longer than the others</span>'
        '<span><i class="k-cold"></i>less long</span></p>'
    )
    return ["<h2>Compared with the other ranks</h2>", key, *parts] if parts else []


def _stripe(
    matrix: Matrix, blocks: Blocks, sample: Sample, slow: Sequence[int]
) -> tuple[dict[str, list[float]], list[int]]:
    """Name -> shares of a step, and the first step of each column."""
    order = sorted(range(len(matrix)), key=lambda at: (sample.ranks[at] not in slow, -abs(median(matrix[at]))))
    shown = sorted(order[:STRIPES_MAX])
    size = -(-len(blocks) * len(shown) // CELLS)
    begins = range(0, len(blocks), size)
    rows = {
        f"rank {sample.ranks[at]}": [median(matrix[at][begin : begin + size]) / sample.usual for begin in begins]
        for at in shown
    }
    return rows, [blocks.steps[begin] for begin in begins]


_HEAD = ("rank", "host", "steps", "p50", "p90", "p99", *PHASES, "rest", "in collectives", "saves", "dropped marks")


def _table(rows: Sequence[RankRow], slow: Sequence[int]) -> str:
    head = "".join(f'<th scope="col"{_text(name)}>{name}</th>' for name in _HEAD)
    body = "".join(
        f"<tr{_slow(row, slow)}>" + "".join(map("<td{}>{}</td>".format, map(_text, _HEAD), _cells(row))) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _slow(row: RankRow, slow: Sequence[int]) -> str:
    return ' class="slow"' if row.rank in slow else ""


def _text(column: str) -> str:
    return ' class="text"' if column == "host" else ""


def _cells(row: RankRow) -> list[str]:
    begin = [str(row.rank), escape(row.host), f"{row.steps:,}"]
    if row.step_s is None or row.share is None:
        return begin + [""] * (len(_HEAD) - 3)
    shares = [getattr(row.share, name) for name in (*PHASES, "rest", "communication")]
    times = [row.step_s.p50, row.step_s.p90, row.step_s.p99]
    saves = f"{row.saves} of {ms(row.save_s)}" if row.save_s is not None else "0"
    return [*begin, *map(ms, times), *map(percent, shares), saves, f"{row.dropped:,}"]
