"""A file that records that a job began from scratch and has completed no checkpoint since, for the next start.

Without this file, what an interrupted first save has left behind cannot be told from files that were lost. Files of
training that cannot be used count as the former only if it exists.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lastgasp.adapter.files import write_atomically

log = logging.getLogger("lastgasp")

NAME = ".lastgasp.begun"


def begin(directory: Path, job: str) -> None:
    """Training begins from scratch. Logs what the disk refuses."""
    try:
        write_atomically(directory / NAME, f"{job} began from scratch; no checkpoint was finished since\n".encode())
    except OSError as error:
        log.warning("%s could not be written: %s", directory / NAME, error)


def finished(directory: Path) -> None:
    """A checkpoint is complete. Idempotent; any rank. Logs what the disk refuses."""
    try:
        (directory / NAME).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be removed: %s", directory / NAME, error)


def exists(directory: Path) -> bool:
    """Whether the file exists."""
    return (directory / NAME).is_file()
