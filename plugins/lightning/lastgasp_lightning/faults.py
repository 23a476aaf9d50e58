"""What an exception that ended training says about its origin."""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lastgasp.adapter import ControlError, DeadlineExceeded, FaultKind
from lastgasp.adapter.torch import exception_origin


def kind_of(exception: BaseException) -> FaultKind:
    """As for any exception of torch's; sigterm where Lightning itself was asked to stop; a lost rank or controller."""
    if isinstance(exception, ControlError | DeadlineExceeded):  # while a periodic checkpoint was agreed on
        return "peer"
    return "sigterm" if isinstance(exception, SIGTERMException) else exception_origin.kind_of(exception)
