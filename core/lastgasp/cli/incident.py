"""`lastgasp incident DIR`: the last incident as a table and as a picture."""

from __future__ import annotations

import os
from pathlib import Path

import click
import msgspec
from rich.table import Table

from lastgasp._fs import read_bounded
from lastgasp.checkpoint.addenda import added, ranks_named
from lastgasp.errors import ConfigError
from lastgasp.events import Incident, decode_incident, encode_incident

from ._console import console, escape
from ._layouts import LAYOUTS
from ._timeline import duration, headline, moments, shown, spans

SHOWN = 8
"""Files of one checkpoint."""
LONGEST = 64 << 20
"""Bytes of a record."""
EPILOG = """
\b
Examples:
  lastgasp incident ckpts
  lastgasp incident ckpts --png timeline.png
  lastgasp incident ckpts --json | jq .phases

\b
Exit codes:
  0  an incident was found and shown
  1  matplotlib is missing, or the picture cannot be written
  2  wrong usage, or DIR holds no incident
"""


@click.command(epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record itself, and draw only with --png.")
@click.option(
    "--png", type=click.Path(dir_okay=False, path_type=Path), help="Where to draw the timeline [beside the record]."
)
def incident(directory: Path, as_json: bool, png: Path | None) -> None:
    """Show the last incident of the checkpoint directory DIR and draw its timeline.

    DIR may also be its incidents, or one record: DIR/incidents/ID.json.
    """
    path, record = last_incident(directory)
    if as_json:
        click.echo(encode_incident(record), nl=False)
    else:
        _print(record)
    if png or not as_json:
        target = png or path.with_suffix(".png")
        _draw(record, target)
        click.echo(f"timeline: {target}", err=as_json)


def last_incident(where: Path) -> tuple[Path, Incident]:
    """Return the newest record, by the time of its fault, and its path.

    Args:
        where: a checkpoint directory, or one record.

    Raises:
        ConfigError: there is none, or none can be read.
    """
    paths = [where] if where.is_file() else _records(where)
    found, bad = list[tuple[int, Path, Incident]](), list[str]()
    for path in paths:
        try:
            record = decode_incident(read_bounded(path, LONGEST))
        except (OSError, msgspec.DecodeError) as error:
            bad.append(f"{path.name}: {error}")
        else:
            found.append((_began(record), path, record))
    if not found:
        why = f" ({'; '.join(bad)})" if bad else ""
        raise ConfigError("DIR", str(where), f"a directory with incidents/ID.json{why}",
                          "Give the checkpoint directory of a job that had a fault.")  # fmt: skip
    if bad:
        click.echo(f"could not be read, and may be newer: {'; '.join(bad)}", err=True)
    _, path, record = max(found, key=lambda item: item[:2])
    return path, record


def _records(where: Path) -> list[Path]:
    folder = where if where.name == "incidents" else where / "incidents"
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError("DIR", str(where), f"a directory whose {folder.name} can be listed",
                          f"{error.strerror or error}: {folder}.") from error  # fmt: skip


def _began(record: Incident) -> int:
    times = [time for time in msgspec.structs.asdict(record.phases).values() if time is not None]
    return min(times, default=0)


def _draw(record: Incident, target: Path) -> None:
    from ._picture import draw

    try:
        draw(record, target)
    except OSError as error:
        raise click.ClickException(f"{target} cannot be written: {error.strerror or error}. Give --png.") from error


def _print(record: Incident) -> None:
    out = console()
    out.print(f"[bold]{escape(headline(record))}[/]")
    for part in (_facts(record), _faults(record), _phases(record)):
        out.print(part)
    for unused in record.unused:
        out.print(f"rank {unused.rank} did not save: {escape(unused.why)}")
    for note in [*record.notes, *_added(record)]:
        out.print(f"note: {escape(note)}")


def _added(record: Incident) -> list[str]:
    """What other ranks have put beside the checkpoint since: notes of the moment may be gloomier than the resume."""
    found = {rank for path in map(Path, record.files) for layout in LAYOUTS.values() for rank in added(path, layout)}
    if not found:
        return []
    return [f"the random state of {ranks_named(found)} has been added to the checkpoint since: a resume restores it"]


def _facts(record: Incident) -> Table:
    table = Table(show_header=False, title=f"incident {escape(record.id)}", title_justify="left")
    rows = {
        "job": f"{record.job}, attempt {record.attempt}, {record.world_size} ranks",
        "ending": record.ending + (f": {record.reason}" if record.reason else ""),
        "step saved": "none" if record.step_saved is None else str(record.step_saved),
        "steps lost": "unknown" if record.steps_lost is None else str(record.steps_lost),
        "saved by": ", ".join(f"rank {rank}" for rank in record.savers) or "nobody",
        "bytes": "unknown" if record.ending == "saved" and not record.nbytes else f"{record.nbytes:,}",
        "files": "\n".join(line for name in record.files for line in _written(Path(name))) or "none",
        "led by": record.led_by or "unknown",
    }
    if record.restart:
        rows["restarted"] = record.restart
    if record.rung and record.from_files:
        rows["in place"] = f"{record.rung}; all ranks begin with the checkpoint"
    elif record.rung:
        rows["in place"] = f"{record.rung}; held in memory by {rows.pop('saved by')}"
    if record.not_in_place:
        rows["not in place"] = record.not_in_place
    if record.incarnation:
        rows["incarnation"] = str(record.incarnation)
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _written(checkpoint: Path) -> list[str]:
    """The checkpoint, and its files where they are scattered: then nothing has its name."""
    if checkpoint.exists():
        return [str(checkpoint)]
    scattered = [layout for layout in LAYOUTS.values() if not layout.owns(checkpoint, checkpoint.name)]
    try:
        names = next((sorted(found) for layout in scattered if (found := layout.files(checkpoint))), [])
    except OSError:
        names = []
    more = [f"  and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return [str(checkpoint), *(f"  {name}" for name in names[:SHOWN]), *more]


def _faults(record: Incident) -> Table:
    table = Table("rank", "fault", "last step", "cause")
    for fault in record.faults:
        table.add_row(str(fault.rank), fault.kind, str(fault.step) if fault.step >= 0 else "none", escape(fault.cause))
    return table


def _phases(record: Incident) -> Table:
    table = Table("phase", "ms after the fault", "then", "for")
    for column in (1, 3):
        table.columns[column].justify = "right"
    following = spans(record.phases, bool(record.rung))
    for number, moment in enumerate(moments(record.phases)):
        then = following[number] if number < len(following) else None
        took = (then.activity, duration(then.ms)) if then else ("", "")
        table.add_row(shown(moment.phase, record), f"{moment.at_ms:,.1f}", *took)
    return table
