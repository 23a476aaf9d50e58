"""MindIO ends a process ten seconds after its exit notice, by `os._exit(2)` on a thread of its own, whatever still goes
on (docs/facts/mindio_tft.md §6, §16.10). Where it made no checkpoint, ours may need longer than that."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn


class LastWord:
    """`os._exit` as MindIO finds it: its calls come here, and those of everybody else go where they always went.

    Args:
        package: a module of MindIO's; what lies in the folder of its top-level package is MindIO.
        asked: called with nothing on MindIO's thread, before the process ends; may wait, and end it with another code.
    """

    def __init__(self, package: ModuleType, asked: Callable[[], object]) -> None:
        top = sys.modules.get(package.__name__.partition(".")[0], package)
        self._folder = f"{Path(top.__file__ or '?').parent}{os.sep}"
        self._asked, self._real, self._pid = asked, os._exit, os.getpid()

    def install(self) -> None:
        """From now on."""
        self._real = os._exit
        vars(os)["_exit"] = self._exit

    def remove(self) -> None:
        """As it was; nothing where somebody else has put something there since."""
        if os._exit == self._exit:
            vars(os)["_exit"] = self._real

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() == self._pid and sys._getframe(1).f_code.co_filename.startswith(self._folder):
            try:
                self._asked()
            except BaseException as error:  # MindIO's thread has nobody who could hear it
                print(f"lastgasp: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self._real(status)


def park() -> None:
    """Never returns: this thread has no business any more, and the process ends without it."""
    threading.Event().wait()
