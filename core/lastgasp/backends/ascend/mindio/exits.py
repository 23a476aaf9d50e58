"""How a rank's end is told to MindIO, which takes exits it is not told of for normal ones (mindio_tft.md §16.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from lastgasp.gasp.rank_status import Released

from .window import FORCE_STOP, STEP_FINISH

DETECTION = 30.0
"""Seconds in which MindIO notices a dead rank (8 to 12) and begins a dump; who only saw a peer die waits as long."""

ARF_FINISH = "ARF FINISH"
# First match counts; the third column: only where retry is granted (mindio_tft.md §5). A multi-bit error may have come
# in the middle of an update unless device times prove otherwise, and nobody takes them here: its data count as bad.
_PATTERNS = (
    ("UCE ERROR", "RS_UCE", True),
    ("HBM MULTI BIT ECC", "RS_UCE_CORRUPTED", True),
    (FORCE_STOP, "RS_NORMAL", False),
    (ARF_FINISH, "RS_PREREPAIR_FINISH", False),
    (STEP_FINISH, "RS_STEP_FINISH", False),
    ("HCCL OP RETRY FAILED", "RS_HCCL_FAILED", True),
    ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED", True),
    ("UB LINK ERROR", "RS_HCCL_FAILED", True),
    ("HCCS LINK ERROR", "RS_HCCL_FAILED", True),
)
PARKED = ("RS_PREREPAIR_FINISH", "RS_STEP_FINISH")
"""States that go straight to the wait for a repair, without stop and clean."""


@dataclass(frozen=True)
class Telling:
    """What to report to MindIO.

    Args:
        state: the name in its ReportState.
        after: seconds to wait for an ending first: this rank is whole, and would be no holder once it had spoken.
    """

    state: str
    after: float = 0.0


def telling(kind: str, cause: str, retry: bool) -> Telling:
    """For a fault of this kind (`events.FaultKind`) that is not repaired in place.

    A peer's death is not a fault of this rank: MindIO would count it among the faulty ones, and a job in which all
    survivors' collectives raise (gloo) would have no holder left.
    """
    state = state_of(cause, retry)
    if state == "RS_NORMAL":
        return Telling(state)
    return Telling("RS_UNKNOWN", DETECTION if kind == "peer" else 0.0)


def state_of(text: str, retry: bool) -> str:
    """The state that MindIO's own decorator would report for an exception of this text."""
    return next((state for word, state, only in _PATTERNS if word in text and (retry or not only)), "RS_UNKNOWN")


def as_runtime_error(error: BaseException) -> RuntimeError:
    """A framework's exit as what MindIO's decorator classifies: it lets SystemExit and KeyboardInterrupt pass by."""
    found = RuntimeError(f"the framework left training by {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def without_exits(train: Callable[..., Any]) -> Callable[..., Any]:
    """`train` that raises RuntimeError where it would have left the interpreter."""

    @wraps(train)
    def run(*args: Any, **options: Any) -> Any:
        try:
            return train(*args, **options)
        except Released:  # a recovery is over, and this rank leaves with its exit code
            raise
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            raise as_runtime_error(error) from error

    return run
