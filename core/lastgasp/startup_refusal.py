"""A rank that refuses to start tells its launcher that another try would not help."""

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
    """From now on an uncaught error that no restart can mend ends this process with `exitcodes.REFUSED`.

    Only under a launcher of ours, which stops then; elsewhere the exit code is Python's. Idempotent.
    """
    global _before
    if os.environ.get("LASTGASP_LAUNCHER") and _before is None:
        _before = sys.excepthook
        sys.excepthook = _hook
        atexit.register(_leave)  # early, so that it runs when the others are through


def is_refusal(error: BaseException | None) -> bool:
    """Whether starting again would end the same way."""
    return isinstance(error, LastgaspError) and not error.restart_helps


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Only takes a note: torch calls this from a hook of its own, which prints the traceback afterwards."""
    global _refused
    _refused = is_refusal(error)
    _before(kind, error, trace)


def _leave() -> None:
    if _refused:
        from lastgasp.session import leave_now

        leave_now(exitcodes.REFUSED)
