"""`lastgasp switch`: turn step marks on and off while the job runs, and see which ranks did."""

from __future__ import annotations

import re
import sys
from typing import Any

import click
import msgspec
from rich.table import Table

from lastgasp.gasp import messages as m
from lastgasp.gasp.cards import RankRow, SwitchResult
from lastgasp.gasp.service import WAIT_LEAST, WAIT_MOST
from lastgasp.steps import bits

from ._console import console, escape
from ._jobs import ONE_RANK, Target, job_options, one_target
from .ps import marks_text

MOST_RANKS = 100_000
"""Ranks that --ranks may name."""
_NAMES = ", ".join(bits.SHORT)

EPILOG = f"""
{ONE_RANK} The last change wins between this command and the switch file. A restart of the job begins with the marks
that it was configured with.

\b
Examples:
  lastgasp switch comm=on
  lastgasp switch --ranks 0,3-5 step=on comm=off --wait 5
  lastgasp switch --job digits forward=off dataloader=off --json

\b
Exit codes:
  0  every rank acknowledged
  1  at least one did not (the table says which and why), or the controller did not answer
  2  wrong usage, or there is no such job or rank
"""


class Outcome(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    job: str
    on: list[str]
    off: list[str]
    acknowledged: bool
    """By every rank."""
    ranks: list[dict[str, Any]]
    version: int = 1


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0,3-5` as ranks in ascending order.

    Raises:
        ValueError: it is something else; says what is allowed.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a rank: expected ranks and ranges of ranks, as in 0,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part.strip()!r} ends before it begins: write {last}-{first}")
        if last - first + len(found) >= MOST_RANKS:
            raise ValueError(f"more than {MOST_RANKS} ranks: leave it out to take all ranks of the job")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def parse_settings(words: tuple[str, ...]) -> tuple[int, int]:
    """`step=on comm=off` as the bits to turn on and those to turn off.

    Raises:
        ValueError: an unknown name or value, or a name that is given twice; says what is allowed.
    """
    on = off = 0
    for word in words:
        name, _, value = word.partition("=")
        if name not in bits.SHORT:
            raise ValueError(
                f"{word!r}: {name!r} is not a kind of marks: expected NAME=on or NAME=off, NAME one of {_NAMES}"
            )
        if value not in ("on", "off"):
            raise ValueError(f"{word!r}: {value!r} is not allowed: expected {name}=on or {name}=off")
        bit = bits.SHORT[name]
        if (on | off) & bit:
            raise ValueError(f"{word!r}: {name} is given twice")
        on, off = (on | bit, off) if value == "on" else (on, off | bit)
    return on, off


def _ranks(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else parse_ranks(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _settings(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> tuple[int, int]:
    try:
        return parse_settings(words)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _wait(ctx: click.Context, param: click.Parameter, seconds: float) -> float:
    if not WAIT_LEAST <= seconds <= WAIT_MOST:  # click's own range lets nan through
        raise click.BadParameter(f"{seconds:g} is not allowed: expected {WAIT_LEAST:g} to {WAIT_MOST:g} seconds")
    return seconds


@click.command(epilog=EPILOG)
@click.argument("settings", nargs=-1, required=True, metavar="NAME=on|off...", callback=_settings)
@job_options
@click.option("--ranks", metavar="LIST", callback=_ranks, help="Ranks and ranges of ranks, as in 0,3-5 [all].")
@click.option("--wait", type=float, default=5.0, show_default=True, callback=_wait, metavar="SECONDS",
              help="How long the ranks may take to acknowledge: 0.1 to 600.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
def switch(
    settings: tuple[int, int],
    job: str | None,
    controller: str | None,
    ranks: tuple[int, ...] | None,
    wait: float,
    as_json: bool,
) -> None:
    """Turn step marks on and off in a running job, rank by rank.

    NAME is one of step, forward, dataloader, save and comm. What is not named stays as it is. Each rank acknowledges
    with the marks that are on there now.
    """
    target = one_target(job, controller)
    before, results = _carry_out(target, settings, ranks, wait)
    outcome = _outcome(before.job, settings, results)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(outcome), indent=2))
    else:
        console().print(_table(before, results))
    sys.exit(0 if outcome.acknowledged else 1)


def _carry_out(
    target: Target, settings: tuple[int, int], ranks: tuple[int, ...] | None, wait: float
) -> tuple[m.Ranks, tuple[SwitchResult, ...]]:
    with target.link() as link:
        before = link.ranks()
        unknown = [rank for rank in ranks or () if rank >= before.world_size > 0]
        if unknown:
            why = f"rank {unknown[0]} is unknown: expected ranks from 0 to {before.world_size - 1}"
            raise click.BadParameter(why, param_hint="--ranks")
        return before, link.switch(ranks, *settings, wait).results


def _outcome(job: str, settings: tuple[int, int], results: tuple[SwitchResult, ...]) -> Outcome:
    on, off = ([name for name, bit in bits.SHORT.items() if mask & bit] for mask in settings)
    return Outcome(job, on, off, all(not one.why for one in results), [_rank(one) for one in results])


def _rank(one: SwitchResult) -> dict[str, Any]:
    named = None if one.mask is None else [name for name, bit in bits.SHORT.items() if one.mask & bit]
    return {"rank": one.rank, "acknowledged": not one.why, "marks": named, "why": one.why}


def _table(before: m.Ranks, results: tuple[SwitchResult, ...]) -> Table:
    rows = {row.rank: row for row in before.rows}
    good = sum(not one.why for one in results)
    table = Table("rank", "node", "answer", "marks", title=escape(f"{before.job}  {before.directory}"))
    table.caption, table.caption_justify = f"{good} of {len(results)} ranks acknowledged", "left"
    for one in results:
        answer = f"[bold red]{escape(one.why)}[/]" if one.why else "[green]acknowledged[/]"
        table.add_row(str(one.rank), escape(_node(rows.get(one.rank))), answer, marks_text(one.mask))
    return table


def _node(row: RankRow | None) -> str:
    return row.card.node if row is not None and row.card is not None else "-"
