"""The judge's results: frozen values, the same for the table, the page and `--json`."""

from __future__ import annotations

from typing import Literal

import msgspec

Cause = Literal["data", "compute", "communication", "checkpoint"]


class Slow(msgspec.Struct, frozen=True):
    """A rank that is slow, and why.

    Attributes:
        rank: who.
        cause: `data`: waits for its batches; `compute`: forward, backward or optimizer take longer; `communication`:
            comes late to collectives for a reason outside of all marks; `checkpoint`: saving.
        confidence: 0 to 1; how far beyond the thresholds the evidence is. Not a probability.
        lost_s: seconds per step that it takes longer than the others; for `checkpoint` seconds per save, which where
            nobody else saves is all of it.
        lost_share: that as a share of the job's time.
        since_step: the step with which it began; None: as far back as the records go.
        evidence: what was seen, in plain words with numbers.
    """

    rank: int
    cause: Cause
    confidence: float
    lost_s: float
    lost_share: float
    since_step: int | None
    evidence: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True):
    """What the judge found.

    Attributes:
        slow: the slow ranks, most certain first; empty if none.
        notes: what is worth knowing and names no rank.
        unjudged: what could not be judged, and why.
        judged: how many ranks were compared with others; 1 in a job of one rank, which has its own past.
        steps: steps that were looked at, per rank.
        first, last: their numbers; 0 without any.
    """

    slow: tuple[Slow, ...] = ()
    notes: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    judged: int = 0
    steps: int = 0
    first: int = 0
    last: int = 0
