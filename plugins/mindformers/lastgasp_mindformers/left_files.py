"""MindSpore's OnRequestExit and BackupAndRestore load a file that an earlier run has left where training begins.

OnRequestExit also does so where an evaluation begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lastgasp.adapter.mindspore import Unreadable, read_content
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

    def hide(self, callbacks: Iterable[Any], resumed: int, *, evaluation: bool = False) -> list[str]:
        """Before the `on_train_begin` or `on_eval_begin` of all of them.

        Where training begins a file that is newer than step `resumed` gets another name: its callback saves older
        weights over it at its next save.

        Returns:
            What is to be said of each file that would have been loaded.
        """
        self.show()
        told: list[str] = []
        kinds = ("OnRequestExit",) if evaluation else tuple(_NAMES)
        for callback in callbacks:
            for name, end in (pair for kind in kinds if is_a(callback, kind) for pair in _NAMES[kind]):
                path = getattr(callback, name, None)
                if isinstance(path, str) and os.path.isfile(file := f"{path}{end}"):
                    self._hidden.append((callback, name, path))
                    setattr(callback, name, f"{path}.left-alone")
                    what = f"a callback of MindSpore's would have loaded {file} over step {resumed}, and does not."
                    told.append(f"{what} {_future(file, None if evaluation else resumed)}")
        return told

    def show(self) -> None:
        """Behind them. Idempotent."""
        while self._hidden:
            setattr(*self._hidden.pop())


def _future(file: str, resumed: int | None) -> str:
    """What becomes of it."""
    step = _step(file)
    if resumed is None or step is None or step <= resumed:
        return "The callback's next save replaces it"
    kept = f"{file}.step-{step}"
    try:
        os.replace(file, kept)
    except FileNotFoundError:  # another rank has
        pass
    except OSError as error:
        return f"It holds step {step}, which is newer, cannot be renamed ({error}), and the next save replaces it"
    remedy = "To train from it as MindSpore would, give it its name back and start with resume='never'"
    return f"It holds step {step}, which is newer, and is kept as {kept}. {remedy}"


def _step(file: str) -> int | None:
    try:
        return read_content(Path(file), checksums=False).step
    except (OSError, Unreadable):
        return None
