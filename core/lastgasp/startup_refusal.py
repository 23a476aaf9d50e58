"""Lets a rank that refuses to start tell its launcher that another try would not help."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import Any

from lastgasp import exitcodes
from lastgasp.errors import LastgaspError

_before: Any = None
_refused = False


def tell_launcher() -> None:
    """Make an uncaught error that no restart can fix end this process with `exitcodes.REFUSED`.

    Only under a launcher of lastgasp's, which then stops; otherwise the exit code is Python's. Idempotent.
    """
    global _before
    if os.environ.get("LASTGASP_LAUNCHER") and _before is None:
        _before = sys.excepthook
        sys.excepthook = _hook
        atexit.register(_leave)  # registered early, so that it runs last


def is_refusal(error: BaseException | None) -> bool:
    """Whether another start would end the same way."""
    return isinstance(error, LastgaspError) and not error.restart_helps


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Only remember it: torch calls this from a hook of its own, which prints the traceback afterwards."""
    global _refused
    _refused = is_refusal(error)
    _before(kind, error, trace)


def _leave() -> None:
    if _refused:
        from lastgasp.gasp.leaving import leave_now

        leave_now(exitcodes.REFUSED)
