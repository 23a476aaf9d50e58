"""A folder for matplotlib, where the user of a container has none that can be written.

matplotlib, which torchmetrics and so Lightning imports, then makes a temporary one in each process that imports it, and
removes it when that process ends (3.11). So ranks could not be forked from such a process. With one of the launcher's
it makes none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec

VARIABLE = "MPLCONFIGDIR"
_PLACES = (("XDG_CONFIG_HOME", "~/.config"), ("XDG_CACHE_HOME", "~/.cache"))
"""Where it looks without that variable, and else."""


class MatplotlibFolder:
    """One per launcher, made when it is first asked for."""

    def __init__(self) -> None:
        self._path = ""

    def variables(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What the environment of the ranks needs; nothing where matplotlib is not there, or has a folder."""
        if self._path:
            return {VARIABLE: self._path}
        if environ.get(VARIABLE):
            return {}
        # no folder for temporary files: then matplotlib cannot be imported; or a script has put another module there
        with contextlib.suppress(OSError, ValueError):
            if find_spec("matplotlib") is not None and not _has_places(environ):
                self._path = tempfile.mkdtemp(prefix="lastgasp-matplotlib-")
                return {VARIABLE: self._path}
        return {}

    def close(self) -> None:
        """Remove it; idempotent."""
        path, self._path = self._path, ""
        if path:
            shutil.rmtree(path, ignore_errors=True)


def _has_places(environ: Mapping[str, str]) -> bool:
    """Whether matplotlib has its two folders; or the user's settings are in one, which the variable would hide."""
    config, cache = (
        os.path.join(environ.get(name) or os.path.expanduser(place), "matplotlib") for name, place in _PLACES
    )
    return _can_be_written(config) and (_can_be_written(cache) or (os.path.isdir(config) and bool(os.listdir(config))))


def _can_be_written(folder: str) -> bool:
    """Whether it is there for us, or can be made."""
    if not os.path.isabs(folder):  # there is no home, not even in the list of users
        return False
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
