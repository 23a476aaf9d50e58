"""MindSpore's OnRequestExit and BackupAndRestore load a file that an earlier run has left where training begins.

OnRequestExit also does so where an evaluation begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lastgasp_mindformers.monitors import is_a

_NAMES = {
    "OnRequestExit": (("train_name", ".ckpt"), ("eval_name", ".ckpt")),
    "BackupAndRestore": (("backup_file", ""),),
}
"""The attributes of each that name its files, and what follows."""


class LeftFiles:
    """Keeps each of them from loading over what was resumed from; what it saves later has its own name again."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Any, str, str]] = []

    def hide(self, callbacks: Iterable[Any], *, evaluation: bool = False) -> list[str]:
        """Before the `on_train_begin` or `on_eval_begin` of all of them; returns the files that would be loaded."""
        self.show()
        found: list[str] = []
        kinds = ("OnRequestExit",) if evaluation else tuple(_NAMES)
        for callback in callbacks:
            for name, end in (pair for kind in kinds if is_a(callback, kind) for pair in _NAMES[kind]):
                path = getattr(callback, name, None)
                if isinstance(path, str) and os.path.isfile(f"{path}{end}"):
                    self._hidden.append((callback, name, path))
                    setattr(callback, name, f"{path}.left-alone")
                    found.append(f"{path}{end}")
        return found

    def show(self) -> None:
        """Behind them. Idempotent."""
        while self._hidden:
            setattr(*self._hidden.pop())
