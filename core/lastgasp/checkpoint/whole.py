"""Whether a file of `torch.save` is whole, as far as it can tell itself: a zip file with a CRC-32 of each record."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from lastgasp._fs import open_regular

_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files begin that torch before 1.6 wrote, and `_use_new_zipfile_serialization=False` writes: no checksums."""


def torch_problem(path: Path) -> str:
    """What is wrong with it; empty where nothing is, or where its old format cannot tell. Reads all of it."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            old = file.read(len(_BEFORE_1_6)) == _BEFORE_1_6
    except OSError as error:
        return f"is no whole file of torch.save: {error}"
    return "" if old else zip_problem(path)


def zip_problem(path: Path) -> str:
    """What is wrong with a zip file; empty where nothing is. Reads all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return f"is no whole file of torch.save: {error}"
    return f"record {bad} has a wrong checksum" if bad else ""
