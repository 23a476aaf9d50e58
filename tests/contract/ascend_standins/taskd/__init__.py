"""A stand-in of MindCluster's TaskD 7.0.0 for contract tests: what docs/facts/taskd.md says, and nothing more.

`violations` collects what the real package would take badly without raising; a test asserts that it is empty.
"""

from __future__ import annotations

import os
import stat

__version__ = "7.0.0"

violations: list[str] = []


def _log_directory() -> None:
    """Importing makes the directory, and raises unless it is of mode 0750 exactly and no symlink (§1)."""
    path = os.environ.get("TASKD_LOG_PATH") or "./taskd_log"
    if os.path.islink(path):
        raise ValueError(f"{path} is a symlink")
    os.makedirs(path, mode=0o750, exist_ok=True)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode != 0o750:
        raise ValueError(f"mode of {path} is {mode:o}")


_log_directory()
