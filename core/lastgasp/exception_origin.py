"""Classifies exceptions that ended training by their origin, for every framework."""

from __future__ import annotations

from collections.abc import Callable

from lastgasp.errors import UsageError
from lastgasp.events import FaultKind
from lastgasp.output import is_lost

_LINE, _LISTED = 300, 600
"""Greatest length of a cause in characters: of one line, and with a list below it."""


def kind_by(error: BaseException, is_peer: Callable[[BaseException], bool]) -> FaultKind:
    """Classify an error: exit and interrupt by type; peer if `is_peer` says that another rank was lost."""
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    return "peer" if is_peer(error) else "exception"


def is_success(error: BaseException) -> bool:
    """Whether user code ended the job by an exit with code 0, so that training ended well."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def cause_of(error: BaseException) -> str:
    """Describe an error in one line: its type and first line, plus the following lines if that ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = " ".join(lines) if lines[0].endswith(":") else lines[0][:_LINE]
    return f"{type(error).__name__}: {told[:_LISTED]}"


def may_pass(error: BaseException) -> bool:
    """Whether the same step may succeed when it is done again: devices, links, files and memory fail by such errors.

    A mistake in the program (TypeError, IndexError, a call that lastgasp refuses, ...) would only come again.
    """
    if isinstance(error, OSError) and error.errno is not None and is_lost(error.errno):
        return False  # it has printed where nobody reads
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__):
        return False  # torch's: from then on this process can do nothing on its device
    mistakes = NotImplementedError | RecursionError | UsageError
    return isinstance(error, RuntimeError | OSError) and not isinstance(error, mistakes)
