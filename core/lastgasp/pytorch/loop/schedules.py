"""How often each scheduler is stepped between an update and the end of its step; learning rates that begin anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from lastgasp.pytorch.loop.other_scalers import OtherScalers
from lastgasp.pytorch.loop.other_schedulers import OtherSchedulers, counts

RATES_ANEW = (
    "the loop has set the learning rates of the first updates of this epoch again, although others came before these. "
    "If it counts its batches or updates anew in a resumed run, it trains with other rates than it would without the "
    "fault: begin the count with s.step, keep it in TorchState(extra=...), or use s.enumerate(loader)"
)
"""Note of the first updates of a resumed run."""
_GROUPS = 1000
"""Of more parameter groups nothing is recorded."""
_IN_TURN = 2
"""So many updates may have rates of their own in turn."""


class FirstRates:
    """The learning rates of an epoch's first two updates, which a loop that counts anew will set again.

    Of the first one where it sets them before an update, of the second one where it sets them behind it (timm). Nothing
    is said of rates that come back in the same epoch, as constant and cyclic ones do, nor of those of a scheduler that
    has been stepped on from where it was.

    Args:
        optimizers, schedulers: the user's.
    """

    def __init__(self, optimizers: Iterable[Any], schedulers: Iterable[Any] = ()) -> None:
        self._optimizers, self._schedulers = list(optimizers), list(schedulers)
        self._counts = list[int]()
        self._epoch, self._count = -1, 0
        self._begin = list[list[float]]()
        self._told: Callable[[str], object] | None = None
        self._due: list[list[float]] = []
        self._last: list[float] = []

    def _rates(self) -> list[float]:
        rates = [group.get("lr") for one in self._optimizers for group in one.param_groups]
        return [rate for rate in rates if isinstance(rate, float)] if len(rates) <= _GROUPS else []

    def opens(self, epoch: int) -> None:
        """An update of `epoch` begins."""
        rates = self._rates()
        if self._told is not None:
            self._compare(rates, epoch)
        if epoch != self._epoch:
            self._epoch, self._begin, self._count = epoch, [], 0
        for number, one in enumerate(self._begin):
            if rates == one:
                self._begin[number] = []  # it has come back
        if self._count < _IN_TURN:
            self._begin.append(rates)
        self._count += 1

    def _compare(self, rates: list[float], epoch: int) -> None:
        """An update of a resumed run, with that of a loop that counts anew; the second one may be of a new epoch."""
        told, first, anew = self._told, len(self._due) == _IN_TURN, self._due.pop(0)
        if not self._due or (first and (epoch != self._epoch or rates != self._last)):  # behind updates nothing is set
            self._told = None
        if told is not None and (not first or epoch == self._epoch) and anew and rates == anew:
            self._told = None
            if rates != self._last and not self._goes_on():  # else it is where it was, or what the schedule gives
                told(RATES_ANEW)
        self._last = rates

    def _goes_on(self) -> bool:
        """Whether a scheduler has been stepped since, and has set the rates."""
        stepped = [one for one, before in zip(self._schedulers, self._counts, strict=True) if _last_epoch(one) > before]
        return any(_set_by(one) for one in stepped)

    def record(self) -> tuple[int, list[list[float]]]:
        """What `resumed` gets: rates that may have come in turn are left out."""
        known = self._count - _IN_TURN
        return self._epoch, [one if number < known else [] for number, one in enumerate(self._begin)]

    def resumed(self, record: tuple[int, list[list[float]]] | None, note: Callable[[str], object]) -> None:
        """The state of a checkpoint is loaded; `note` is told if the next updates have the rates of the first again."""
        if record is not None and any(record[1]):
            self._epoch, self._begin, self._count = record[0], [*record[1]], 2 * _IN_TURN
            self._due, self._last, self._told = [*record[1]], self._rates(), note
            self._counts = [_last_epoch(one) for one in self._schedulers]


class ScheduleWatch:
    """Counts the steps of schedulers, so that a step that was cut short after its update can be completed.

    Args:
        schedulers, optimizers: the user's.
        others, scalers: what is not in the `TorchState`.

    Attributes:
        rates: what is known of learning rates.
    """

    def __init__(
        self,
        schedulers: Iterable[Any],
        optimizers: Iterable[Any] = (),
        others: OtherSchedulers | None = None,
        scalers: OtherScalers | None = None,
    ) -> None:
        self._schedulers, self._others, self._scalers = list(schedulers), others, scalers
        self.rates = FirstRates(optimizers, self._schedulers)
        self._before = self._counts()
        self._usual = dict[int, int]()

    def _all(self) -> list[Any]:
        return self._schedulers if self._others is None else [*self._schedulers, *self._others.alive()]

    def _counts(self) -> dict[int, int]:
        return {id(one): counts(one) for one in self._all()}

    def opens(self, epoch: int = 0) -> None:
        """An update begins, in `epoch`."""
        self._before = self._counts()
        self.rates.opens(epoch)

    def closes(self, step: int = 0) -> None:
        """`step` has ended."""
        self._usual = {one: now - self._before[one] for one, now in self._counts().items() if one in self._before}
        if self._others is not None:
            self._others.step_over(step)
        if self._scalers is not None:
            self._scalers.step_over()

    def catch_up(self, step: int = 0) -> None:
        """Step each scheduler as often as in the step before. One that needs a metric is not stepped."""
        now = self._counts()
        for one in self._all():
            done = now[id(one)] - self._before.get(id(one), now[id(one)])
            if not isinstance(one, ReduceLROnPlateau):
                for _ in range(self._usual.get(id(one), 0) - done):
                    one.step()
        if self._others is not None:
            self._others.step_over(step)

    def record(self, step: int) -> dict[str, Any]:
        """What `resumed` gets with the checkpoint of `step`."""
        others = None if self._others is None else self._others.record(step)
        return {"first_rates": self.rates.record(), "other_schedulers": others}

    def resumed(
        self, again: Callable[[], None], record: Mapping[str, Any], note: Callable[[str], object]
    ) -> Callable[[], None]:
        """The state of a checkpoint is loaded; `record` is as `record` gave it, among other things.

        Returns:
            What restores it where the loop is back at its position: `again`, and schedulers of the loop's own.
        """
        self.rates.resumed(record.get("first_rates"), note)
        if (others := self._others) is None:
            return again
        others.resumed(record.get("other_schedulers"))

        def all_again() -> None:
            again()
            others.returned()

        return all_again


def watch_schedules(state: Any, life: Any, saved: bool) -> ScheduleWatch:
    """The `ScheduleWatch` of a `TorchState`, until the run (`AdapterRun`) ends; `saved`: as of `OtherSchedulers`."""
    others, scalers = OtherSchedulers(state, life.session.note, saved), OtherScalers(state, life.session.note)
    life.on_close(others.remove)
    life.on_close(scalers.remove)
    return ScheduleWatch(state.schedulers.values(), state.optimizers.values(), others, scalers)


def _last_epoch(scheduler: Any) -> int:
    """Its own count, which `step(epoch)` sets; of a ChainedScheduler that of the first one."""
    while not hasattr(scheduler, "last_epoch") and (chained := getattr(scheduler, "_schedulers", None)):
        scheduler = chained[0]
    return int(getattr(scheduler, "last_epoch", 0))


def _set_by(scheduler: Any) -> bool:
    """Whether the rates of its optimizer are those that it has set last."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return bool(groups) and [group.get("lr") for group in groups] == list(getattr(scheduler, "_last_lr", ()))
