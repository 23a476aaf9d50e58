"""Step marks: what a step consists of, and where its ranges are recorded."""

from __future__ import annotations

from lastgasp.steps.attach import no_mark, no_step

__all__ = [
    "no_mark",
    "no_step",
]
