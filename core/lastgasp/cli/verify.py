"""`lastgasp verify DIR`: every checkpoint against its digests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click
import msgspec
from rich.table import Table

from lastgasp.checkpoint import Verdict, progress_bar
from lastgasp.checkpoint import verify as verify_one
from lastgasp.checkpoint.layout import is_moved_away
from lastgasp.checkpoint.moving import aside_in
from lastgasp.errors import ConfigError
from lastgasp.narration import event

from ._console import console, escape
from ._layouts import find, nothing_in
from .incident import last_incident

State = Literal["good", "damaged", "no manifest", "unreadable"]
_STYLE = {"good": "green", "damaged": "bold red", "no manifest": "yellow", "unreadable": "red"}

EPILOG = """
\b
Examples:
  lastgasp verify ckpts
  lastgasp verify ckpts --json | jq '.checkpoints[] | select(.state != "good")'

\b
Exit codes:
  0  every checkpoint is good
  1  at least one is damaged or unreadable, and will not be resumed from, or has no manifest
  2  wrong usage, or DIR holds no checkpoint
"""


class Range(msgspec.Struct, frozen=True):
    """One damage: bytes `begin` to `end` (exclusive) of `file`; both 0 for the file as a whole."""

    file: str
    kind: str
    begin: int
    end: int
    detail: str


class Row(msgspec.Struct, frozen=True):
    """One checkpoint and what is wrong with it."""

    path: str
    step: int | None
    state: State
    damages: list[Range]


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    directory: str
    checkpoints: list[Row]
    quarantined: list[str]
    """Checkpoints that an earlier resume has moved away, damaged or unfit; their reasons stand beside them."""
    set_aside: list[str]
    """What stood where a dying gasp of the same name was saved, under its hidden name. Nothing reads or removes it."""
    version: int = 1

    @property
    def exit_code(self) -> int:
        """0 when there is a checkpoint and all are good, else 1."""
        return int(not self.checkpoints or any(row.state != "good" for row in self.checkpoints))


@click.command(epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
def verify(directory: Path, as_json: bool) -> None:
    """Read every checkpoint in DIR and compare it with its digests.

    A damaged one is named with file and byte range. Nothing is changed. Directories inside of DIR, such as fit-2 of a
    second training, are not searched: give each.
    """
    report = examine(directory)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        _print(report)
    sys.exit(report.exit_code)


def examine(directory: Path) -> Report:
    """Verify all checkpoints in `directory`, newest first.

    Raises:
        ConfigError: there is none, or the directory cannot be listed.
    """
    if not directory.is_dir():
        raise nothing_in(directory)
    found = find(directory)
    moved = (path for path in directory.iterdir() if is_moved_away(path.name) and path.suffix != ".json")
    quarantined = sorted(map(str, moved))
    aside = [str(path) for path in aside_in(directory)]
    if not found and not quarantined and not aside:
        raise _none_yet(directory) if (directory / "incidents").is_dir() else nothing_in(directory)
    rows = []
    for _, layout, candidate in found:
        with progress_bar(f"verify {candidate.path.name}") as progress:
            verdict = verify_one(candidate.path, layout, progress=progress)
        gone = not verdict.ok and not layout.parts(candidate.path) and not layout.manifest_path(candidate.path).exists()
        if not gone:  # by the job's own rotation, since it was listed
            rows.append(_row(verdict, candidate.step))
    return Report(str(directory), rows, quarantined, aside)


def _none_yet(directory: Path) -> ConfigError:
    """The error for the directory of a job that has saved nothing: where its last fault has left the step."""
    try:
        said = event(last_incident(directory)[1])
    except ConfigError:
        said = "nothing that can be read"
    return ConfigError("DIR", str(directory), "a directory with a checkpoint, and this job has saved none yet",
                       f"Its last incident says: {said}.")  # fmt: skip


def _row(verdict: Verdict, step: int | None) -> Row:
    damages = [Range(d.file, d.kind, d.offset, d.offset + d.length, d.detail) for d in verdict.damages]
    return Row(str(verdict.path), step, _state(verdict), damages)


def _state(verdict: Verdict) -> State:
    if verdict.ok:
        return "good"
    kinds = {damage.kind for damage in verdict.damages}
    if kinds == {"no_manifest"}:
        return "no manifest"
    # What cannot be read now, or not by this version, is not known to be damaged.
    bad = [d for d in verdict.damages if d.kind != "unreadable" and (d.kind != "bad_manifest" or d.proven)]
    return "damaged" if bad else "unreadable"


def _print(report: Report) -> None:
    table = Table("step", "checkpoint", "state", "what is wrong", title=escape(report.directory))
    for row in report.checkpoints:
        reasons = "\n".join(_reason(damage) for damage in row.damages)
        state = f"[{_STYLE[row.state]}]{row.state}[/]"
        table.add_row("?" if row.step is None else str(row.step), escape(Path(row.path).name), state, reasons)
    out = console()
    out.print(table)
    if any(row.state == "no manifest" for row in report.checkpoints):
        out.print("If you trust those without a manifest as they are, `lastgasp manifest DIR` gives them one.")
    for path in report.quarantined:
        out.print(f"moved away earlier, with the reason beside it: {escape(path)}")
    for path in report.set_aside:
        out.print(f"set aside for a gasp of the same name, remove it when you do not need it: {escape(path)}")


def _reason(damage: Range) -> str:
    where = f" bytes {damage.begin}-{damage.end}" if damage.end else ""
    return escape(f"{damage.file}{where}: {damage.detail}")
