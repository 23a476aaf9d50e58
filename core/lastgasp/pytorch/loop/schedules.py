"""How often each scheduler is stepped between an update and the end of its step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau


class ScheduleWatch:
    """Counts the steps of schedulers, so that a step that was cut short after its update can be completed.

    Args:
        schedulers: the user's.
    """

    def __init__(self, schedulers: Iterable[Any]) -> None:
        self._schedulers = list(schedulers)
        self._before = self._counts()
        self._usual = [0] * len(self._schedulers)

    def _counts(self) -> list[int]:
        return [_count(s) for s in self._schedulers]

    def opens(self) -> None:
        """An update begins."""
        self._before = self._counts()

    def closes(self) -> None:
        """The step has ended."""
        self._usual = self._missing_since([0] * len(self._schedulers))

    def _missing_since(self, usual: list[int]) -> list[int]:
        return [now - before - n for now, before, n in zip(self._counts(), self._before, usual, strict=True)]

    def catch_up(self) -> None:
        """Step each scheduler as often as in the step before. One that needs a metric is not stepped."""
        for scheduler, done in zip(self._schedulers, self._missing_since(self._usual), strict=True):
            if not isinstance(scheduler, ReduceLROnPlateau):
                for _ in range(-done):
                    scheduler.step()


def _count(scheduler: Any) -> int:
    """How often it was stepped. SequentialLR counts in `last_epoch` alone, ChainedScheduler in those that it chains."""
    while not hasattr(scheduler, "_step_count") and (chained := getattr(scheduler, "_schedulers", None)):
        if hasattr(scheduler, "last_epoch"):
            break
        scheduler = chained[0]
    return int(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0)))
