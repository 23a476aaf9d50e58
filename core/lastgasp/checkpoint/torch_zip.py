"""Check the integrity of a `torch.save` file by its own checksums: it is a zip file with a CRC-32 of each record.

Unless it was written without them (`torch.serialization.set_crc32_options(False)`, and as lastgasp itself does, whose
manifests have better ones): then only a cut is seen.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from lastgasp._fs import open_regular

_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files written by torch before 1.6 or with `_use_new_zipfile_serialization=False`: no checksums."""


def torch_problem(path: Path) -> str:
    """The damage, or empty if there is none or the old format cannot show it. Reads the entire file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            old = file.read(len(_BEFORE_1_6)) == _BEFORE_1_6
    except OSError as error:
        return f"is not a complete file of torch.save: {error}"
    return "" if old else zip_problem(path)


def zip_problem(path: Path) -> str:
    """The damage of a zip file, or empty. Reads the entire file."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip() if any(one.CRC for one in archive.infolist()) else None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return f"is not a complete file of torch.save: {error}"
    return f"record {bad} has a wrong checksum" if bad else ""
