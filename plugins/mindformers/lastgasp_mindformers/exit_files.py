"""MindSpore's OnRequestExit loads a file of a fixed name, which nobody removes, where training or evaluation begins."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lastgasp_mindformers.monitors import is_a

_NAMES = ("train_name", "eval_name")


class ExitFiles:
    """Keeps each OnRequestExit from loading over what was resumed from; what it saves later has its own name again."""

    def __init__(self) -> None:
        self._hidden: list[tuple[Any, str, str]] = []

    def hide(self, callbacks: Iterable[Any]) -> list[str]:
        """Before the `on_train_begin` or `on_eval_begin` of all of them; returns the files that would be loaded."""
        self.show()
        for callback in callbacks:
            if is_a(callback, "OnRequestExit"):
                self._hidden += [(callback, name, path) for name in _NAMES if (path := _would_load(callback, name))]
        for callback, name, path in self._hidden:
            setattr(callback, name, f"{path}.left-alone")
        return [f"{path}.ckpt" for _, _, path in self._hidden]

    def show(self) -> None:
        """Behind them. Idempotent."""
        while self._hidden:
            setattr(*self._hidden.pop())


def _would_load(callback: Any, name: str) -> str:
    path = getattr(callback, name, None)
    return path if isinstance(path, str) and os.path.isfile(f"{path}.ckpt") else ""
