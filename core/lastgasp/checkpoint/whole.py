"""Whether a file of `torch.save` is whole, as far as it can tell itself: a zip file with a CRC-32 of each record."""

from __future__ import annotations

import zipfile
from pathlib import Path


def zip_problem(path: Path) -> str:
    """What is wrong with it; empty where nothing is. Reads all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return f"is no whole file of torch.save: {error}"
    return f"record {bad} has a wrong checksum" if bad else ""
