"""What MindIO's decorator makes of an exception (docs/facts/mindio_tft.md §5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lastgasp_mindio.enums import ReportState

FORCE_STOP = "FORCE STOP"
BAD_DATA = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
"""This rank's state must not be saved: its memory has failed."""

_PATTERNS = (
    ("UCE ERROR", ReportState.RS_UCE),
    # Without the device's clock nobody can tell whether it came outside of the update.
    ("HBM MULTI BIT ECC", ReportState.RS_UCE_CORRUPTED),
    (FORCE_STOP, ReportState.RS_NORMAL),
    ("ARF FINISH", ReportState.RS_PREREPAIR_FINISH),
    ("STEP FINISH", ReportState.RS_STEP_FINISH),
    ("HCCL OP RETRY FAILED", ReportState.RS_HCCL_FAILED),
    ("SUSPECT REMOTE ERROR", ReportState.RS_HCCL_FAILED),
    ("UB LINK ERROR", ReportState.RS_HCCL_FAILED),
    ("HCCS LINK ERROR", ReportState.RS_HCCL_FAILED),
)


@dataclass
class Classifier:
    """The ordered table of patterns; the first that is in the message counts.

    Attributes:
        own: those of `tft_register_exception_handler`, which come last.
    """

    own: list[tuple[str, str, Callable[[str], str]]] = field(default_factory=list)

    def state_of(self, error: BaseException) -> ReportState:
        """Only a RuntimeError is looked at. Errors of memory and links count as such with `enable_uce` off, too."""
        if not isinstance(error, RuntimeError):
            return ReportState.RS_UNKNOWN
        text = str(error)
        for word, state in _PATTERNS:
            if word in text:
                return state
        for word, named, handle in self.own:
            if word in text:
                return _state(handle(text), named)
        return ReportState.RS_UNKNOWN


def _state(*names: object) -> ReportState:
    """The first name that MindIO knows; a handler that returns nonsense is one of `RS_UNKNOWN`."""
    for name in names:
        if isinstance(name, str) and name in ReportState.__members__:
            return ReportState[name]
    return ReportState.RS_UNKNOWN
