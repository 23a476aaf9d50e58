"""`lastgasp manifest DIR`: manifests for checkpoints that were written without lastgasp."""

from __future__ import annotations

import json
import sys
from collections.abc import Container
from pathlib import Path
from typing import Literal

import click
import msgspec

from lastgasp._fs import read_bounded
from lastgasp.checkpoint import Candidate, Provenance, World
from lastgasp.checkpoint.adopt import ADOPTED, data_files, read_entries, write_manifest
from lastgasp.checkpoint.torch_zip import torch_problem
from lastgasp.errors import CheckpointError
from lastgasp.mindspore.content import Unreadable, read_content
from lastgasp.mindspore.layout import ITERATIONS, LEGACY, rank_of
from lastgasp.mindspore.modelcheckpoint import PLAIN, ModelCheckpointLayout
from lastgasp.mindspore.probe import probe
from lastgasp.ports import Layout
from lastgasp.tensorflow.bundle import content_problem
from lastgasp.tensorflow.prefixes import whole_problem

from ._console import printable
from ._layouts import find, nothing_in

State = Literal["written", "present", "refused"]
TRACKER = "latest_checkpointed_iteration.txt"
ENDINGS = (".pt", ".pth", ".tar", ".ckpt")
"""Files of torch.save."""
NUMBERED = ("lightning", "megatron")
"""Formats whose checkpoints have their step in the name; of others, those without one count from 0, by their age."""

EPILOG = """
\b
Examples:
  lastgasp manifest ckpts
  lastgasp verify ckpts

\b
Exit codes:
  0  every checkpoint has a manifest now
  1  at least one was refused: it is incomplete or damaged, or its manifest cannot be read
  2  wrong usage, or DIR holds no checkpoint
"""


class Row(msgspec.Struct, frozen=True):
    """What was done about one checkpoint, and why not more."""

    path: str
    step: int | None
    state: State
    reason: str = ""


@click.command(epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of lines.")
def manifest(directory: Path, as_json: bool) -> None:
    """Give every checkpoint in DIR that has no manifest one, from the bytes that are there now.

    From then on a change to them is detected. Those recognised as incomplete are refused: files of torch.save
    with a wrong checksum, torch's sharded files without .metadata, .safetensors that lack bytes, TensorFlow's that lack
    a file or bytes (or, up to 256 MB, have a wrong checksum), MindSpore's that lack a rank's file, bytes or parameters
    that others hold, and iterations behind the tracker of Megatron or MindFormers, whose save was not finished. Nothing
    else is changed, and checkpoints that have a manifest are left alone. Plain files without a step in their names
    count from 0, in the order in which they were last written.
    """
    rows = adopt_all(directory)
    if as_json:
        click.echo(json.dumps({"directory": str(directory), "checkpoints": msgspec.to_builtins(rows)}, indent=2))
    else:
        for row in rows:
            click.echo(printable(f"{row.state:8} {Path(row.path).name}{': ' if row.reason else ''}{row.reason}"))
    sys.exit(int(any(row.state == "refused" or row.reason for row in rows)))


def adopt_all(directory: Path) -> list[Row]:
    """Do it for all checkpoints in `directory`, newest first.

    Raises:
        ConfigError: there is none, or the directory cannot be listed.
    """
    found = sorted(find(directory.absolute()), key=lambda item: (item[2].step or 0, _written_ns(item[1], item[2])))
    if not found:
        raise nothing_in(directory)
    # Oldest first: among equal steps the manifest made last is the newest.
    return [_adopt(name, layout, candidate) for name, layout, candidate in found][::-1]


def _written_ns(layout: Layout, candidate: Candidate) -> int:
    """When its newest file was written; 0 if unknown."""
    try:
        return max((path.stat().st_mtime_ns for path in layout.files(candidate.path).values()), default=0)
    except OSError:
        return 0


def _adopt(name: str, layout: Layout, candidate: Candidate) -> Row:
    path, step = candidate.path, candidate.step
    if layout.manifest_path(path).exists():
        return Row(str(path), step, "present", "" if candidate.problem is None else candidate.problem)
    try:
        reason = _not_whole(name, layout, candidate)
        if not reason:
            ranks = _ranks(layout, path)
            world = World(world_size=len(ranks), replica_groups=tuple((rank,) for rank in ranks)) if ranks else World()
            made_by = Provenance(format=name.split()[0], step=step or 0, kind="periodic", job=ADOPTED, world=world)
            write_manifest(path, layout, made_by, read_entries(path, layout))
    except (OSError, CheckpointError) as error:
        reason = str(error)
    return Row(str(path), step, "refused" if reason else "written", reason)


def _not_whole(format: str, layout: Layout, candidate: Candidate) -> str:
    """Why the checkpoint is recognised as incomplete; else empty."""
    if candidate.step is None and format in NUMBERED:
        return "its name contains no step: rename it (best-step=20.ckpt), or give it to the job by resume="
    latest = _tracked(candidate.path.parent)
    if format == "megatron" and latest is not None and (candidate.step or 0) > latest:
        return f"{TRACKER} says {latest}: its save was not finished"
    if format.startswith("mind"):
        return _mindspore_problem(layout, candidate)
    if format == "tensorflow":
        return whole_problem(candidate.path) or content_problem(candidate.path)
    files = data_files(candidate.path, layout)
    for name, path in sorted(files.items()):
        if path.suffix in ENDINGS and (problem := torch_problem(path)):
            return f"{name}: {problem}"
        if path.suffix == ".safetensors" and (problem := _safetensors_problem(path)):
            return f"{name}: {problem}"
        if path.suffix == ".distcp" and not _has_metadata(name, files):
            return f"{name}: no .metadata stands beside it: its save was not finished"
    return ""


def _has_metadata(name: str, files: Container[str]) -> bool:
    """Whether torch's description of `name` (`__RANK_N.distcp`) is there: one for all, or with `use_collectives=False`
    one for each rank."""
    folder, slash, own = name.rpartition("/")
    rank = own.removeprefix("__").partition("_")[0]
    return any(f"{folder}{slash}{one}.metadata" in files for one in ("", f"__{rank}"))


def _safetensors_problem(path: Path) -> str:
    try:
        read_content(path, checksums=False)
    except Unreadable as error:
        return str(error)
    return ""


def _ranks(layout: Layout, path: Path) -> range:
    """The ranks that have a file of MindSpore's; whether they hold the same, nobody wrote down."""
    return range(len({rank_of(path, name) for name in layout.files(path)} - {None}))


def _mindspore_problem(layout: Layout, candidate: Candidate) -> str:
    if candidate.step is None:
        return "it does not say how many steps it holds"
    latest = _tracked(candidate.path.parent)
    if layout is ITERATIONS and (latest is None or candidate.step > latest):
        return f"{TRACKER} says {latest}: its save was not finished"
    lacking = _lacking(layout, candidate.path)
    if lacking:
        return f"it has no file in {', '.join(lacking)}: its save was not finished, or files were lost"
    return "; ".join(probe(candidate.path, layout, candidate.step).reasons)


def _lacking(layout: Layout, path: Path) -> list[str]:
    """Folders of ranks that hold no file of it; none where one file is for all."""
    files = layout.files(path)
    if not (layout is LEGACY or any("/" in name for name in files)):
        return []
    lies = layout if isinstance(layout, ModelCheckpointLayout) else PLAIN
    return sorted(set(lies.rank_folders(path.parent)) - {name.split("/")[0] for name in files})


def _tracked(directory: Path) -> int | None:
    try:
        text = read_bounded(directory / TRACKER, 4096).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None
