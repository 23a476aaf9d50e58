"""Step marks: what a step consists of, and where its ranges are recorded."""

from __future__ import annotations

from lastgasp.steps.attach import no_mark, no_step
from lastgasp.steps.bits import BIT_OF_MARK, STEP

__all__ = [
    "BIT_OF_MARK",
    "STEP",
    "no_mark",
    "no_step",
]
