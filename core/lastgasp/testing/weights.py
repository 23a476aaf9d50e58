"""Compare two files of `torch.save` bit by bit, without torch: they are zip archives of raw storages."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lastgasp.errors import CheckpointError


def records(path: Path) -> dict[str, bytes]:
    """The pickle (names, shapes, types) and the raw storages of a file, by name without the archive's own.

    Raises:
        CheckpointError: the file is no such archive, or is damaged.
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} was not written by torch.save: {error}. Give the final weights.") from error
    return {name: data for name, data in found.items() if name == "data.pkl" or name.startswith("data/")}


def differences(one: Path, other: Path) -> list[str]:
    """The records in which two files differ; empty when every bit of their content is equal.

    Raises:
        CheckpointError, OSError: as `records`.
    """
    first, second = records(one), records(other)
    names = sorted(set(first) | set(second))
    return [name for name in names if first.get(name) != second.get(name)]
