"""What MindIO's decorator makes of an exception (docs/facts/mindio_tft.md §5)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from lastgasp_mindio.enums import ReportState

log = logging.getLogger("lastgasp")

FORCE_STOP = "FORCE STOP"
BAD_DATA = (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)
"""This rank's state must not be saved: its memory has failed."""

_OTHER = "OTHER"
_STATES = {
    "UCE ERROR": "RS_UCE",
    "HBM MULTI BIT ECC": "RS_UCE_CORRUPTED",
    FORCE_STOP: "RS_NORMAL",
    "ARF FINISH": "RS_PREREPAIR_FINISH",
    "STEP FINISH": "RS_STEP_FINISH",
    "HCCL OP RETRY FAILED": "RS_HCCL_FAILED",
    "SUSPECT REMOTE ERROR": "RS_HCCL_FAILED",
    "UB LINK ERROR": "RS_HCCL_FAILED",
    "HCCS LINK ERROR": "RS_HCCL_FAILED",
}
"""By pattern. Without the device's clock nobody can tell whether an HBM error came outside of the update."""
_MORE = {
    "HBM MULTI BIT ECC can repair": "RS_UCE",
    "HBM MULTI BIT ECC can't repair": "RS_UCE_CORRUPTED",
    _OTHER: "RS_UNKNOWN",
}
"""What a handler may return besides."""
Handle = Callable[[str], str]


@dataclass
class Classifier:
    """The ordered table of patterns; the first that is in the message counts.

    Attributes:
        handles: what an exception with that pattern is, by its text: a key of `states`.
        states: names of ReportStates.
    """

    handles: dict[str, Handle | None] = field(default_factory=lambda: dict.fromkeys(_STATES))
    states: dict[str, str] = field(default_factory=lambda: _STATES | _MORE)

    def register(self, pattern: str, state: str, handle: Handle) -> None:
        """`tft_register_exception_handler`; a pattern that is there already keeps its place."""
        self.handles[pattern], self.states[pattern] = handle, state

    def state_of(self, error: BaseException) -> ReportState:
        """Only a RuntimeError is looked at. Errors of memory and links count as such with `enable_uce` off, too."""
        if not isinstance(error, RuntimeError):
            return ReportState.RS_UNKNOWN
        text = str(error)
        for pattern, handle in self.handles.items():
            if pattern in text:
                return self._state(pattern, handle, text)
        return ReportState.RS_UNKNOWN

    def _state(self, pattern: str, handle: Handle | None, text: str) -> ReportState:
        """The fault has to be reported, whatever is wrong with a handler."""
        try:
            return ReportState[self.states[handle(text) if handle is not None else pattern]]
        except Exception as error:
            log.warning("the exception handler of %r is no help (%r): the fault counts as RS_UNKNOWN", pattern, error)
            return ReportState.RS_UNKNOWN
