"""Says which data a resumed run will not get exactly, at the start and after a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lastgasp.pytorch.loop.data_pass import DataPass
from lastgasp.pytorch.position import STATEFUL, WORKERS

log = logging.getLogger("lastgasp")

_REPLAY = (
    ". s.batches(loader, replay=True), without persistent_workers, makes it exact: it loads what was consumed of the "
    "pass again"
)


LATE = (
    "a loader goes on in turn with another one, or from epoch to epoch, which the loop has just shown: a resume from "
    "this step begins its pass again; from a later one it goes on where it was"
)
"""Note of a step at whose end it looked as if it were over with what goes on beside it, as an inner loop's is."""


class Inexact:
    """One per run.

    Args:
        note: is told what a resume could not restore.
    """

    def __init__(self, rank: int, note: Callable[[str], None]) -> None:
        self._rank, self._note = rank, note
        self._told: set[str] = set()

    def tell(self, one: DataPass, resumed: bool) -> None:
        """A pass has begun."""
        reason = one.inexact
        if not reason:
            return
        if resumed and one.consumed and not one.over:
            own = f"{WORKERS}: where they draw any (augmentation), this run draws other ones"
            self._note(own if reason == WORKERS else f"the data may not be those that were due: {reason}")
        elif reason not in self._told and self._rank == 0:
            if reason == WORKERS:
                log.warning("%s: where they draw any (augmentation), a run that was resumed in the middle of a pass "
                            "will draw other ones%s", WORKERS,
                            "" if one.kind == STATEFUL else _REPLAY)  # fmt: skip
            else:
                log.warning("a run that is resumed in the middle of a pass will get other data: %s", reason)
        self._told.add(reason)
