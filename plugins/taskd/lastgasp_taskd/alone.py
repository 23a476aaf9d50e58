"""The real TaskD is never shadowed: where it is installed as well, importing this one fails with the reason."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

REMEDY = "On a machine with MindCluster `pip uninstall lastgasp-taskd`; lastgasp itself works with the real TaskD."


def refuse_beside_the_real_one(package: Path) -> None:
    """Look for the real one in this package's own folder, on the import path, and among what is installed.

    Args:
        package: the folder of the package `taskd` that is being imported.

    Raises:
        ImportError: it is there.
    """
    folders = [package, *(Path(entry) / "taskd" for entry in sys.path)]
    for folder in folders:
        if (folder / "python" / "cython_api").is_dir():
            raise ImportError(f"lastgasp-taskd does not stand in for MindCluster's own TaskD in {folder}. {REMEDY}")
    try:
        real = distribution("taskd")
    except PackageNotFoundError:
        return
    raise ImportError(
        f"lastgasp-taskd and the distribution taskd {real.version} bring a package of one name, and one has "
        f"overwritten files of the other. Uninstall both, then install the one that you mean. {REMEDY}"
    )
