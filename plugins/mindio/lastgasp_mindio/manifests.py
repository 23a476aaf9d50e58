"""Manifests for what a save handler has written and a rename handler has named."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lastgasp.adapter import CheckpointError, Layout, ManifestWriter
from lastgasp.adapter.checkpoint import (
    DirectoryLayout,
    SingleFile,
    next_path,
    put_back,
    read_entries,
    remove_orphans,
    set_aside,
    write_manifest,
)
from lastgasp.adapter.files import locked

log = logging.getLogger("lastgasp")


def expected(directory: Path, layout: SingleFile | DirectoryLayout, step: int) -> Path:
    """Where the checkpoint of `step` probably is going to lie; for people.

    What follows its number (`iter_0000012_tmp`) is gone behind the rename, but for an ending of the user's own pattern.
    """
    path = found(directory, layout, step)
    number = re.match(rf"(.*\D)?0*{step}(?!\d)", path.name) if path is not None else None
    return directory if path is None else path.with_name(number[0] + ending(layout)) if number else path


def ending(layout: SingleFile | DirectoryLayout) -> str:
    """Of the names of finished checkpoints, behind their numbers."""
    return layout.suffix if isinstance(layout, SingleFile) else layout.pattern.rpartition("*")[2]


def found(directory: Path, layout: Layout, step: int) -> Path | None:
    """The checkpoint of `step`; where names with an ending fit as well (`iter_0000012.tmp`), the shortest one."""
    return next(iter(_fitting(directory, layout, step)), None)


def _fitting(directory: Path, layout: Layout, step: int) -> list[Path]:
    found = [path for path in layout.discover(directory) if layout.step(path) == step and layout.parts(path)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


@contextmanager
def room_for(directory: Path, layout: Layout, step: int) -> Iterator[None]:
    """Around the rename handler: a checkpoint of that step that is there already, such as a periodic one, is set aside.

    A rename into a directory that is not empty fails, and a move goes into it. What was set aside comes back where the
    handler has put nothing into its place, also where this process is killed meanwhile (`put_back`).
    """
    fitting = _fitting(directory, layout, step)
    if len(fitting) < 2:  # the dump alone, under whatever name
        yield
        return
    announced = next_path(layout.manifest_path(fitting[0]))
    with locked(directory):
        announced.touch()
        set_aside(fitting[0], layout)
    try:
        yield
    finally:
        put_back(directory, layout)
        announced.unlink(missing_ok=True)


def seal(directory: Path, layout: Layout, step: int, writer: ManifestWriter) -> tuple[Path | None, str]:
    """Make the dump durable, read it back and write its manifest.

    Returns:
        Where the dump lies; and why it has no manifest, for people, or an empty string.
    """
    path = found(directory, layout, step)
    if path is None:
        return None, f"the dump of step {step} has no manifest: nothing in {directory} fits the layout {layout}"
    try:
        entries = read_entries(path, layout)
        write_manifest(path, layout, writer.provenance(step, "gasp", writer.newest_beside(path, layout)), entries)
        remove_orphans(directory, layout)
    except (OSError, CheckpointError) as error:
        return path, f"the dump {path} has no manifest: {error}"
    return path, ""
