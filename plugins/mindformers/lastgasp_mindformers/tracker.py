"""What MindFormers itself takes for the newest checkpoint: `meta.json` of each rank; in the newer format a tracker.

Both are written without fsync. lastgasp names to MindFormers what to load, and repairs them only so that a start
without lastgasp would take the same one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from lastgasp.adapter.files import write_atomically
from lastgasp.adapter.mindspore import META, LegacyName

log = logging.getLogger("lastgasp")

NAME = "latest_checkpointed_iteration.txt"


def read_tracker(directory: Path) -> int | None:
    """The iteration that the tracker names; None where there is none that can be read."""
    try:
        text = (directory / NAME).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def repair_tracker(directory: Path, iteration: int) -> None:
    """Make the tracker say `iteration`, atomically and durably, unless it does. Logs what the disk refuses."""
    was = read_tracker(directory)
    if was != iteration:
        _write(directory / NAME, str(iteration).encode(), f"{NAME} said {was}")


def repair_meta(directory: Path, name: LegacyName, ranks: Iterable[int]) -> None:
    """Make the `meta.json` of these ranks name that checkpoint, unless they do. Logs what the disk refuses."""
    for relative, content in name.markers(ranks).items():
        path = directory / relative
        try:
            present = path.read_bytes()
        except OSError:
            present = b""
        if present != content and path.parent.is_dir():
            _write(path, content, f"{relative} said {present[:200].decode(errors='replace')!r}")


def read_meta(directory: Path, rank: int) -> tuple[int, int] | None:
    """Epoch and step of it that the `meta.json` of `rank` names; None where there is none that can be read."""
    try:
        told = json.loads((directory / f"rank_{rank}" / META).read_bytes())
        return int(told["last_epoch"]), int(told["last_step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, content: bytes, was: str) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        log.warning("%s could not be repaired: %s", path, error)
        return
    log.warning("%s in %s, it says %s now", was, path.parent, content.decode(errors="replace"))
