"""Manifests for what a save handler has written and a rename handler has named."""

from __future__ import annotations

import logging
from pathlib import Path

from lastgasp.adapter import CheckpointError, Layout, ManifestWriter
from lastgasp.adapter.checkpoint import read_entries, remove_orphans, write_manifest

log = logging.getLogger("lastgasp")


def expected(directory: Path, layout: Layout, step: int) -> Path:
    """Where the checkpoint of `step` probably is going to lie; for people."""
    return found(directory, layout, step) or directory


def found(directory: Path, layout: Layout, step: int) -> Path | None:
    """The checkpoint of `step`; where names with an ending fit as well (`iter_0000012.tmp`), the shortest one."""
    fitting = [path for path in layout.discover(directory) if layout.step(path) == step and layout.parts(path)]
    return min(fitting, key=lambda path: (len(path.name), path.name), default=None)


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
