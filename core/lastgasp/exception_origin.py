"""What an exception that ended training says about its origin, whatever the framework is."""

from __future__ import annotations

from collections.abc import Callable

from lastgasp.events import FaultKind

_LINE, _LISTED = 300, 600
"""Characters of a cause: of one line, and with a list below it."""


def kind_by(error: BaseException, is_peer: Callable[[BaseException], bool]) -> FaultKind:
    """exit and interrupt by type; peer where `is_peer` says that another rank is gone."""
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    return "peer" if is_peer(error) else "exception"


def is_success(error: BaseException) -> bool:
    """Whether user code ends the job by an exit with code 0: training has ended well."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def cause_of(error: BaseException) -> str:
    """One line: type and first line of the text, with what follows where that announces it by a colon (`misfits:`)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = " ".join(lines) if lines[0].endswith(":") else lines[0][:_LINE]
    return f"{type(error).__name__}: {told[:_LISTED]}"
