"""Damage to files, as disks and hands make it, for tests and the demo."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Invert one bit of the byte at `offset`; size and modification rights stay.

    Raises:
        ValueError: the file has no such byte.
        OSError: it cannot be written.
    """
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        if not byte:
            raise ValueError(f"{path} has no byte {offset}: it ends at {path.stat().st_size}")
        file.seek(offset)
        file.write(bytes([byte[0] ^ (1 << bit)]))
