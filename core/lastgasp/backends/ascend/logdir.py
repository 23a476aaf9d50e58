"""TaskD's log directory: `import taskd` raises if it is a symlink or its mode is not exactly 0750 (taskd.md §1)."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from lastgasp.errors import ConfigError

log = logging.getLogger("lastgasp")

VARIABLE = "TASKD_LOG_PATH"
DEFAULT = "taskd_log"
"""In the working directory."""
MODE = 0o750


def prepare_log_directory(env: Mapping[str, str]) -> Path:
    """Create TaskD's log directory such that importing TaskD works with any umask.

    Args:
        env: where `TASKD_LOG_PATH` may stand.

    Returns:
        The directory.

    Raises:
        ConfigError: it is a symlink or no directory, or it cannot be made or changed.
    """
    given = env.get(VARIABLE) or DEFAULT
    path = Path(given).absolute()
    remedy = f"Set {VARIABLE} to another directory, before the process starts."
    if path.is_symlink():
        raise ConfigError(VARIABLE, given, "a real directory, no symlink: TaskD refuses those", remedy)
    try:
        path.mkdir(mode=MODE, parents=True, exist_ok=True)  # all ranks of a node come at once
        if (mode := stat.S_IMODE(path.stat().st_mode)) != MODE:
            os.chmod(path, MODE)
            log.info("%s had mode %04o: TaskD wants exactly %04o, and has it now", path, mode, MODE)
    except OSError as error:
        allowed = f"a directory of mode {MODE:04o} that this user can write"
        raise ConfigError(VARIABLE, given, allowed, f"{error.strerror or error}. {remedy}") from error
    return path
