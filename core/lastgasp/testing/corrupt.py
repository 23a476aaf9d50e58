"""Damage files as disks, copying and people do, for tests and the demo."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PAGE = 4096


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Invert one bit of the byte at `offset`; size and permissions do not change.

    Args:
        path: the file; offset: which byte, negative ones count from the end; bit: 0 to 7.

    Raises:
        ValueError: the file has no such byte.
        OSError: it cannot be written.
    """
    size = path.stat().st_size
    position = offset + size if offset < 0 else offset
    if not 0 <= position < size:
        raise ValueError(f"{path} has no byte {offset}: it ends at {size}")
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ (1 << bit)]))


def truncate(path: Path, size: int) -> None:
    """Cut `path` to `size` bytes. Raises ValueError when that would not shorten it."""
    if size >= path.stat().st_size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: {size} would not shorten it")
    os.truncate(path, size)


def empty(path: Path) -> None:
    """Leave a file of no bytes, as a crash without fsync does."""
    truncate(path, 0)


def zero_page(path: Path, page: int = 0) -> None:
    """Zero page number `page` of 4096 bytes, or the part of it that exists.

    Raises ValueError when it is absent, or all zero already.
    """
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        before = file.read(PAGE)
        if not any(before):
            raise ValueError(f"page {page} of {path} is zero or absent already")
        file.seek(page * PAGE)
        file.write(bytes(len(before)))


def drop(path: Path) -> None:
    """Remove one file."""
    path.unlink()


def add_foreign(directory: Path, name: str = "foreign.bin") -> Path:
    """Put a foreign file into a directory."""
    path = directory / name
    path.write_bytes(b"not part of any checkpoint")
    return path


def swap(one: Path, other: Path) -> None:
    """Exchange two files."""
    aside = one.with_name(one.name + ".swapping")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def copy_over(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`, such as the manifest of another job."""
    shutil.copyfile(source, target)


def make_unreadable(path: Path) -> None:
    """Replace a file by a directory: reads fail, even for root."""
    path.unlink()
    path.mkdir()
