"""`lastgasp ps`: the jobs on this machine and their ranks."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from lastgasp.errors import LastgaspError
from lastgasp.gasp import messages as m
from lastgasp.gasp.cards import RankRow
from lastgasp.steps import bits

from ._console import console, escape
from ._jobs import ONE_RANK, Target, job_options, targets

_STYLE = {"running": "green", "awaited": "yellow", "hung": "bold red", "dead": "bold red", "left": "dim"}

EPILOG = f"""
{ONE_RANK} It is not listed here.

\b
Examples:
  lastgasp ps
  lastgasp ps --job digits --json | jq '.jobs[].ranks[] | select(.state == "dead")'
  LASTGASP_TOKEN=... lastgasp ps --controller 10.0.0.1:41327

\b
Exit codes:
  0  every job's controller answered (also where there is no job)
  1  at least one did not
  2  wrong usage, or --job names none of the jobs
"""


class Job(msgspec.Struct, frozen=True):
    """One job as printed by `--json`; `ranks` is empty and `error` says why if its controller did not answer."""

    job: str
    directory: str
    controller: str
    pid: int | None
    error: str = ""
    state: str = "unknown"
    attempt: int = 0
    incarnation: int = 0
    replaced: list[int] = []
    world_size: int = 0
    started_s: int = 0
    ranks: list[dict[str, Any]] = []


@click.command(epilog=EPILOG)
@job_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of tables.")
def ps(job: str | None, controller: str | None, as_json: bool) -> None:
    """List the jobs of this user whose controller runs on this machine, with all their ranks.

    A rank is awaited (has not joined yet), running, hung, left (its training ended) or dead. Step, phase and marks
    are those of its last heartbeat. Incarnation: how often the ranks of this attempt were entered again in place.
    """
    found = [(target, _ask(target)) for target in targets(job, controller)]
    if as_json:
        jobs = [_job(target, answer) for target, answer in found]
        click.echo(msgspec.json.format(msgspec.json.encode({"version": 1, "jobs": jobs}), indent=2))
    else:
        _print(console(), found)
    sys.exit(int(any(isinstance(answer, str) for _, answer in found)))


def marks_text(mask: int | None) -> str:
    """The marks that are on, for a table; - where nothing is marked."""
    return "-" if mask is None else bits.describe(mask)


def _ask(target: Target) -> m.Ranks | str:
    """What the controller answered, or why it did not."""
    try:
        with target.link() as link:
            return link.ranks()
    except LastgaspError as error:
        return str(error)


def _job(target: Target, answer: m.Ranks | str) -> Job:
    if isinstance(answer, str):
        return Job(target.job, target.directory, target.address, target.pid, error=answer)
    return Job(
        job=answer.job,
        directory=answer.directory,
        controller=target.address,
        pid=target.pid,
        state=answer.state,
        attempt=answer.attempt,
        incarnation=answer.incarnation,
        replaced=list(answer.replaced),
        world_size=answer.world_size,
        started_s=answer.started_s,
        ranks=[_rank(row) for row in answer.rows],
    )


def _rank(row: RankRow) -> dict[str, Any]:
    """Flat: the card's fields (none before it has registered), the row's, and the marks by name."""
    card = msgspec.to_builtins(row.card) if row.card is not None else {}
    fields = msgspec.structs.asdict(row)
    del fields["card"]
    named = None if row.marks is None else [name for name, bit in bits.SHORT.items() if row.marks & bit]
    return card | fields | {"marks": named}


# -- the tables ------------------------------------------------------------------------------------


def _print(out: Console, found: list[tuple[Target, m.Ranks | str]]) -> None:
    if not found:
        out.print("this user runs no job with a controller on this machine")
    for target, answer in found:
        if isinstance(answer, str):
            out.print(
                f"[bold]{escape(str(target))}[/bold]\n  [red]the controller does not answer[/red]: {escape(answer)}"
            )
        else:
            out.print(_table(target, answer))


def _table(target: Target, answer: m.Ranks) -> Table:
    title = f"{answer.job or '(no rank yet)'}  {answer.directory}".strip()
    number = f"attempt {answer.attempt}{_in_place(answer)}"
    about = f"{answer.state}, {number}, {answer.world_size} ranks, controller {target.address}"
    pid = f" (process {target.pid})" if target.pid is not None else ""
    names = ["rank", "node", "pid", "device", "state", "step", "phase", "marks", "heard"]
    everywhere = {_versions(row) for row in answer.rows if row.card is not None}
    same = f"\n{min(everywhere)}" if len(everywhere) == 1 else ""
    if len(everywhere) > 1:
        names.append("versions")
    table = Table(*names, title=escape(title), caption=escape(f"{about}{pid}{same}"), caption_justify="left")
    for row in answer.rows:
        cells = _cells(row)
        table.add_row(*cells, *([escape(_versions(row))] if len(everywhere) > 1 else []))
    return table


def _in_place(answer: m.Ranks) -> str:
    """What was answered in place; empty where nothing was."""
    counts = sorted(Counter(answer.replaced).items())
    new = ", ".join(f"rank {rank}" + (f" {count} times" if count > 1 else "") for rank, count in counts)
    return (f", incarnation {answer.incarnation}" if answer.incarnation else "") + (f", replaced: {new}" if new else "")


def _cells(row: RankRow) -> list[str]:
    card = row.card
    state = f"[{_STYLE[row.state]}]{row.state}[/]" + (f": {escape(row.why)}" if row.why else "")
    heard = "-" if row.heard_s is None else f"{row.heard_s:.1f} s"
    who = ["-", "-", "-"] if card is None else [escape(card.node), str(card.pid), escape(card.device) or "-"]
    step = "-" if row.step is None else str(row.step)
    return [str(row.rank), *who, state, step, row.phase or "-", marks_text(row.marks), heard]


def _versions(row: RankRow) -> str:
    return "" if row.card is None else ", ".join(f"{name} {text}" for name, text in row.card.versions.items())
