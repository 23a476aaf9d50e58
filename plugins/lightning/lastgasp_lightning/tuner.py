"""Lightning's tuners train for a trial and put everything back: such runs are left alone.

`Tuner.lr_find` and `Tuner.scale_batch_size` call `fit` themselves: nothing of LastGasp takes part in it. The callbacks
LearningRateFinder and BatchSizeFinder train inside of a fit: while they do, nothing is captured and nothing is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr

from lastgasp.adapter import RankStatus
from lastgasp_lightning.compat import Undo, replace_method, require

log = logging.getLogger("lastgasp")

_METHODS: dict[type[Callback], str] = {LearningRateFinder: "lr_find", BatchSizeFinder: "scale_batch_size"}


def is_tuner_run(trainer: Any) -> bool:
    """Whether this fit is a `Tuner`'s, which ends it before any training of the user's."""
    return any(getattr(finder, "_early_exit", False) for finder, _ in _finders(trainer))


def is_smoke_test(trainer: Any) -> bool:
    """Whether this fit only shows that a script runs (`fast_dev_run`): Lightning saves none of its steps either."""
    return bool(trainer.fast_dev_run)


def _finders(trainer: Any) -> list[tuple[Any, str]]:
    return [(cb, method) for cb in trainer.callbacks for kind, method in _METHODS.items() if isinstance(cb, kind)]


class Tuning:
    """Keeps away from what finders among the callbacks of one fit do.

    Args:
        stand: of this rank; cannot be saved while a finder trains.
        resuming: whether a checkpoint was loaded and its boundary is not reached yet: a finder ran before it was taken,
            and is left out.

    Attributes:
        active: a finder trains; hooks must do nothing.
    """

    def __init__(self, trainer: Any, status: RankStatus, resuming: Callable[[], bool]) -> None:
        self._trainer, self._status, self._resuming = trainer, status, resuming
        self.active = False

    def install(self) -> Undo:
        """Wrap the finders' methods."""
        undo: list[Undo] = []
        for finder, method in _finders(self._trainer):
            require(finder, "_early_exit")
            undo.append(replace_method(finder, method, self._wrap))
        return lambda: [one() for one in undo].clear()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def tune(*args: Any, **kwargs: Any) -> Any:
            if self._resuming():
                log.info("%s was left out: what it found is in the checkpoint", original.__qualname__)
                return None
            with self._alone():
                return original(*args, **kwargs)

        return tune

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.active, was = True, self._status.broken
        self._status.broken = was or "a tuner is training for a trial: the weights are of no step"
        try:
            yield
        finally:
            self._status.broken, self.active = was, False


def found_by(trainer: Any) -> dict[str, Any]:
    """What the finders have set: attribute of model, hparams or datamodule -> value."""
    module, found = trainer.lightning_module, {}
    for finder, _ in _finders(trainer):
        for name in _attributes(finder):
            if lightning_hasattr(module, name):
                found[name] = lightning_getattr(module, name)
                break
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _attributes(finder: Any) -> list[str]:
    if isinstance(finder, BatchSizeFinder):
        return [finder._batch_arg_name]
    if not finder._update_attr:
        return []
    return [finder._attr_name] if finder._attr_name else ["lr", "learning_rate"]


def set_found(trainer: Any, found: dict[str, Any]) -> None:
    """Set it again; before the optimizers and the loaders are made."""
    for name, value in found.items():
        if lightning_hasattr(trainer.lightning_module, name):
            lightning_setattr(trainer.lightning_module, name, value)
