"""Durable files: every byte that must survive goes through here."""

from __future__ import annotations

from lastgasp._fs import (
    DISK,
    locked,
    make_directory,
    read_bounded,
    remove_stale_temps,
    unique_temp,
    write_atomically,
)
from lastgasp.memory_file import memory_file

__all__ = [
    "DISK",
    "locked",
    "make_directory",
    "memory_file",
    "read_bounded",
    "remove_stale_temps",
    "unique_temp",
    "write_atomically",
]
