"""Says which data a resumed run will not get exactly, at the start and after a fault."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from lastgasp.errors import CheckpointError
from lastgasp.pytorch.loop import other_workers
from lastgasp.pytorch.loop.data_pass import DataPass, weakly
from lastgasp.pytorch.position import CHANGED, STATEFUL, WORKERS

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


EPOCHS = (
    "passes over several loaders, one after the other: each of them counts as an epoch in s.epoch. Where an epoch has "
    "more than one of them, a resumed `range(s.epoch, n)` ends too early: use `for epoch in s.epochs(n)`"
)
"""Note of a loop that numbers its epochs by `s.epoch`."""


COUNTED = (
    "a pass that was resumed in its middle gave the batches that were left of it, and was then begun again in the same "
    "epoch: a loop that counts its batches (as Ignite does, by len(s.batches(loader))) has trained on some of them "
    "twice. Let the end of the data end it; for Ignite see plain-loop.md in lastgasp's documents"
)
"""Note of an object of `s.batches` that is iterated again in the epoch of its resume."""


DREW = (
    "this loop draws random numbers before it asks for a batch (by which it chooses the loader, for example). It had "
    "done so when the step ended from which it resumes, and then draws others: a resume is not bit-equal. Call "
    "s.updated() at the end of each step"
)
"""Note of a loop whose random numbers were put back where it began its pass, and had changed when it took a batch."""


PERSISTENT = (
    "a DataLoader with persistent_workers draws a random number of the process when it is iterated first, which is "
    "later in this run than before: random numbers from there on are other ones"
)


class Inexact:
    """One per run.

    Args:
        note: is told what a resume could not restore.
        stays: this process has trained before, so that its loaders may have, too.
    """

    def __init__(self, rank: int, note: Callable[[str], None], stays: bool = False) -> None:
        self._rank, self._note, self._stays = rank, note, stays
        self._told: set[str] = set()
        self._first: Callable[[], Any] | None = None
        other_workers.watch()

    def counts(self, loader: Any, counted: bool, used: bool) -> None:
        """A pass begins.

        Args:
            counted: it is the first one of an epoch that `s.epochs` has not begun.
            used: somebody uses the numbers of epochs.
        """
        other_workers.given(loader)
        if not (counted or self._first is None):
            return
        before = self._first() if self._first is not None else None
        first = weakly(loader)
        self._first = first if isinstance(first, weakref.ref) else _unknown  # a list may be made for each pass
        if used and before is not None and before is not loader and EPOCHS not in self._told:
            self._note(EPOCHS)
            self._told.add(EPOCHS)

    def tell(self, one: DataPass, resumed: bool) -> None:
        """A pass has begun.

        Raises:
            CheckpointError: it is other data than those that were due, which the loaders of a new process may give.
        """
        if one.over and _begins_late(one.loader) and PERSISTENT not in self._told:
            self._note(PERSISTENT)
            self._told.add(PERSISTENT)
        reason = one.inexact
        if not reason:
            return
        if resumed and one.consumed and not one.over:
            if reason == CHANGED and self._stays:
                raise CheckpointError(f"this training cannot go on in its process: {reason}")
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


def _begins_late(loader: Any) -> bool:
    """Its pass was over when the checkpoint was taken, so that its first one in this process is a later one."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", loader) is None


def _unknown() -> None:
    """No loader that is known."""
