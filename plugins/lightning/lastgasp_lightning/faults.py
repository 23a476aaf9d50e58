"""What an exception that ended training says about its origin."""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lastgasp.adapter import FaultKind
from lastgasp.adapter.torch import exception_origin


def kind_of(exception: BaseException) -> FaultKind:
    """As for any exception of torch's, and sigterm where Lightning itself was asked to stop."""
    return "sigterm" if isinstance(exception, SIGTERMException) else exception_origin.kind_of(exception)
