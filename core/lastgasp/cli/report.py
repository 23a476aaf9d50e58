"""`lastgasp report DIR`: how each rank spends a step, which ranks are slow, and why."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.live import Live

from lastgasp import _clock
from lastgasp.checkpoint import progress_bar
from lastgasp.errors import ConfigError
from lastgasp.steps.report.job import Job, JobReader
from lastgasp.steps.report.live import Watch, follow
from lastgasp.steps.report.page import render_page
from lastgasp.steps.report.phrasing import numbers
from lastgasp.steps.report.sample import samples
from lastgasp.steps.report.sources import Place, locate
from lastgasp.steps.report.summary import Report, summarise
from lastgasp.steps.report.tables import render
from lastgasp.steps.report.trace import write_trace

from ._console import console


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    directory: Path
    task: str | None
    ranks: str | None
    last: int | None
    html: Path | None
    trace: Path | None
    as_json: bool
    live: bool
    seconds: float | None
    fail_on_slow: bool


EPILOG = """
\b
Examples:
  lastgasp report ckpts
  lastgasp report /user/cluster-info/profiling --html report.html --trace trace.json
  lastgasp report ckpts --follow --last 500
  lastgasp report ckpts --json | jq '.verdict.slow[] | {rank, cause, confidence}'

\b
Exit codes:
  0  a report was made, even if ranks are slow
  1  a rank is slow and --fail-on-slow was given, or a file cannot be written
  2  wrong usage, or DIR holds no profiling files
"""


FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--task", metavar="NAME", help="Which task, where DIR holds several [the newest].")
@click.option("--rank", "ranks", metavar="RANKS", help="Only these, such as 0,4-7 [all].")
@click.option("--last", metavar="STEPS", type=click.IntRange(min=1), help="Only the newest steps, so many [all].")
@click.option("--html", type=FILE, help="Write a page with plots.")
@click.option("--trace", type=FILE, help="Write a trace for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
@click.option("--follow", "live", is_flag=True,
              help="Go on while the job runs, until Ctrl-C; each rank's newest step is left out.")  # fmt: skip
@click.option("--for", "seconds", metavar="SECONDS", type=click.FloatRange(min=0), help="With --follow: how long.")
@click.option("--fail-on-slow", is_flag=True, help="Exit with 1 where a rank is slow.")
def report(**options: Any) -> None:
    """Show how each rank spends its steps, which ranks are slow, and why.

    DIR has the profiling files of TaskD or lastgasp: the base directory, one task's, one rank's, or the directory of
    a run. A rank counts as slow if its own work takes at least 10 % of a step longer than that of the others, or if it
    reaches collectives that late, consistently and beyond chance; or if saving takes 20 % of the job's time.
    """
    wanted = Options(**options)
    if wanted.live and wanted.as_json:
        raise click.UsageError("--follow with --json: a document is printed once. Leave one of them out.")
    if wanted.seconds is not None and not wanted.live:
        raise click.UsageError("--for belongs to --follow: how long to watch.")
    place = locate(wanted.directory, wanted.task)
    reader = JobReader(place, _chosen(wanted.ranks, place))
    made = _followed(wanted, place, reader) if wanted.live else _once(wanted, reader)
    if wanted.as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(made), indent=2))
    elif not wanted.live:
        console().print(render(made))
    _write(wanted, place, reader.job(), made)
    sys.exit(1 if wanted.fail_on_slow and made.verdict.slow else 0)


def _once(wanted: Options, reader: JobReader) -> Report:
    with progress_bar("read") as progress:
        reader.read(progress)
    reader.end()
    return _report(wanted, reader.job())


def _report(wanted: Options, job: Job) -> Report:
    return summarise(job, wanted.directory, samples(job, wanted.last), wanted.last)


def _followed(wanted: Options, place: Place, reader: JobReader) -> Report:
    """The newest step of each rank is not shown: its rows may not all be there."""
    watch = Watch(_clock.monotonic, threading.Event().wait, wanted.seconds)
    with Live(console=console(), auto_refresh=False) as screen:
        follow(
            reader, place, wanted.directory, watch,
            lambda job: screen.update(render(_report(wanted, job)), refresh=True),
        )  # fmt: skip
    return _report(wanted, reader.job())


def _chosen(text: str | None, place: Place) -> set[int] | None:
    """`0,4-7` as a set.

    Raises:
        ConfigError: no such list, or a rank that has no files.
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.strip().isdecimal() or (dash and not high.strip().isdecimal()):
            raise ConfigError("--rank", text, "ranks such as 0,4-7", "Leave it out for all.")
        part_of = {rank for rank in place.ranks if int(low) <= rank <= int(high if dash else low)}
        if not part_of:
            there = numbers(list(place.ranks))
            raise ConfigError("--rank", text, f"some of {there}", f"{part.strip()} has no files. Leave it out for all.")
        found |= part_of
    return found


def _write(wanted: Options, place: Place, job: Job, made: Report) -> None:
    try:
        if wanted.html is not None:
            found = samples(job, wanted.last)
            wanted.html.write_text(render_page(made, job, found, wanted.last), "utf-8")
            _say(f"page: {wanted.html}")
        if wanted.trace is not None:
            with progress_bar("write trace") as progress:
                count = write_trace(wanted.trace, place, job.ranks, wanted.last, progress)
            _say(f"trace of {count:,} ranges: {wanted.trace}; open it in https://ui.perfetto.dev")
    except OSError as error:
        where = error.filename or wanted.html or wanted.trace
        raise click.ClickException(f"{where} cannot be written: {error.strerror or error}. Give another.") from error


def _say(text: str) -> None:
    """On standard error: the document of --json stays alone on standard output."""
    click.echo(text, err=True)
