"""The report as frozen values, version 1: what `--json` prints, and what the table and the page show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from .job import Job, RankData
from .judge import judge
from .phrasing import numbers
from .robust_stats import quantile
from .sample import Sample
from .saving import saving_of
from .verdict import Verdict

VERSION = 1
PHASES = ("data", "forward", "backward", "optimizer", "save")
"""Columns that one after the other make up a step; what is left is `rest`."""


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float
    p90: float
    p99: float


class Times(msgspec.Struct, frozen=True):
    """Mean share of a rank's time, 0 to 1. `communication` may lie within the other ones."""

    data: float
    forward: float
    backward: float
    optimizer: float
    save: float
    rest: float
    communication: float


class RankRow(msgspec.Struct, frozen=True):
    """One rank in numbers.

    Attributes:
        rank, host: who and where; empty where it is not known.
        steps: how many count; a step that was made again after a resume counts once.
        first_step, last_step: their numbers; None without any.
        step_s: percentiles of the step's range; None without steps.
        share: of its time, what for; None without steps.
        saves, save_s: how many, and the median seconds of one; None without any.
        undone: steps that were made again after a resume.
        earlier: steps before it began with its first one again, as another training of a script does.
        dropped: marks that were lost in memory and counted.
        unreadable, unbegun, unended: lines that were not rows, rows without a beginning, ranges without an end.
        device_rows: where the device's times come from: `device`, `host` (copied from the host's), `mixed`, `none`.
    """

    rank: int
    host: str
    steps: int
    first_step: int | None
    last_step: int | None
    step_s: Percentiles | None
    share: Times | None
    saves: int
    save_s: float | None
    undone: int
    earlier: int
    dropped: int
    unreadable: int
    unbegun: int
    unended: int
    device_rows: str


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints.

    Attributes:
        directory, task: what was read; `other_tasks` lie beside it.
        nbytes: bytes read.
        world_size: ranks of the job as lastgasp wrote it down; 0: not known.
        verdict: which ranks are slow, and why.
        remarks: about the files: what is missing, lost, or replaced by something else.
    """

    directory: str
    task: str
    other_tasks: tuple[str, ...]
    nbytes: int
    world_size: int
    ranks: tuple[RankRow, ...]
    verdict: Verdict
    remarks: tuple[str, ...]
    version: int = VERSION


def summarise(job: Job, directory: Path, found: Sequence[Sample], last: int | None = None) -> Report:
    """The report on a job.

    Args:
        directory: as the user gave it.
        found: `samples(job, last)`.
        last: only so many of the newest steps.
    """
    rows = tuple(_row(data, last) for data in job.ranks.values())
    verdict = judge(found, [saving_of(data, last) for data in job.ranks.values()])
    world = max((data.information.world_size for data in job.ranks.values()), default=0)
    remarks = tuple(_remarks(job, rows, world))
    place = job.place
    return Report(str(directory), place.task, place.others, job.nbytes, world, rows, verdict, remarks)


def _row(data: RankData, last: int | None) -> RankRow:
    table = data.table
    first = max(0, len(table) - last) if last is not None else 0
    saving = saving_of(data, last)
    seconds = [save[2] for save in saving.saves]
    return RankRow(
        rank=data.rank,
        host=data.information.host,
        steps=len(table) - first + (table.thinned if last is None else 0),
        first_step=table.numbers[first] if len(table) else None,
        last_step=table.numbers[-1] if len(table) else None,
        step_s=_percentiles(table.times("time")[first:]) if len(table) else None,
        share=_times(data, first) if len(table) else None,
        saves=len(seconds),
        save_s=quantile(seconds, 0.5) if seconds else None,
        undone=table.undone,
        earlier=table.earlier,
        dropped=data.dropped,
        unreadable=data.unreadable,
        unbegun=data.counts.unbegun,
        unended=data.counts.unended,
        device_rows=data.device_rows,
    )


def _percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(*(quantile(values, share) for share in (0.5, 0.9, 0.99)))


def _times(data: RankData, first: int) -> Times:
    table = data.table
    behind = max((at * 1e-9 + seconds for _, at, seconds in table.saves), default=0.0) - table.ends[-1] * 1e-9
    whole = (sum(table.times("period")[first:]) + max(0.0, behind)) or 1.0  # what is saved behind the newest step
    parts = {name: sum(data.table.times(name)[first:]) / whole for name in (*PHASES, "communication")}
    return Times(**parts, rest=max(0.0, 1.0 - sum(parts[name] for name in PHASES)))


def _remarks(job: Job, rows: Sequence[RankRow], world: int) -> list[str]:
    said = []
    missing = sorted(set(range(world)) - set(job.place.ranks))
    if missing:
        said.append(f"no files of {numbers(missing)}; the job has {world} ranks")
    if job.place.others:
        said.append(f"the newest task is shown; others: {', '.join(job.place.others)} (--task)")
    copied = [row.rank for row in rows if row.device_rows == "host"]
    if copied:
        said.append(f"device times are host times on {numbers(copied)}: no device was measured")
    mixed = [row.rank for row in rows if row.device_rows == "mixed"]
    if mixed:
        said.append(f"some device times are host times on {numbers(mixed)}")
    without = [row.rank for row in rows if not row.steps]
    if without:
        said.append(f"no steps on {numbers(without)}: step marks are off, or no step has ended yet")
    return said + _losses(job, rows)


def _losses(job: Job, rows: Sequence[RankRow]) -> list[str]:
    counts = {
        "{} marks were dropped: the ring was full": sum(row.dropped for row in rows),
        "{} steps were made again after a resume and count once": sum(row.undone for row in rows),
        "{} steps are of earlier trainings, or of starts from the same step, and left out": sum(
            row.earlier for row in rows
        ),
        "{} lines could not be read (cut off or damaged) and were left out": sum(row.unreadable for row in rows),
        "{} rows have no beginning (older files have been removed) and were left out": sum(row.unbegun for row in rows),
        "{} steps were thinned out of the older half to bound memory": sum(
            data.table.thinned for data in job.ranks.values()
        ),
    }
    return [text.format(f"{count:,}") for text, count in counts.items() if count]
