"""Recovery in place: `Trainer.train` is entered again in the same process, from the checkpoint that was just saved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from torch.distributed import distributed_c10d

from lastgasp.adapter import AdapterRun
from lastgasp.adapter.again import KeptModules, Recovery, renew_scaler
from lastgasp.adapter.torch import EnteredFromFiles, rng

JOIN = 60.0
"""Seconds that a new process may take to `train`. The job restarts where the script prepares its data for longer, or
waits there for other ranks (`main_process_first`)."""
_OF_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")
"""What accelerate puts into a module that it prepares, which it would not prepare again otherwise."""
_trained = False


class TrainAgain:
    """One call of `train` by the user, and how often it is made again."""

    def __init__(self, trainer: Any, recovery: Recovery) -> None:
        global _trained
        self._trainer, self._recovery = trainer, recovery
        before, _trained = _trained, True
        self._entered = EnteredFromFiles(_cannot(before))
        wanted = recovery in ("auto", "retry", "replace") and not self._entered.why
        self._reset = _kept(trainer) if wanted else lambda: None

    def offer(self, life: AdapterRun) -> None:
        """Say how a fault may be answered, before training begins."""
        self._entered.offer(life, self._recovery)

    def meet(self) -> None:
        """In a process that has taken the place of a rank: no collective before all others are in `train`, too.

        Raises:
            DeadlineExceeded: one was not in time.
        """
        if self._entered.new and dist.is_initialized():
            self._entered.meet(JOIN)

    def goes_on(self, error: BaseException) -> bool:
        """Whether `train` is to be called again; nothing of the call that has raised `error` is left then.

        Raises:
            RuntimeError, DeadlineExceeded: the other ranks did not come in time; the step is on disk.
        """
        trainer = self._trainer
        wrapped = [trainer.model_wrapped] if trainer.model_wrapped is not trainer.model else []
        if not self._entered.goes_on(error, self._reset, wrapped):
            return False
        if (backend := PartialState().backend) is not None:
            limit = trainer.args.ddp_timeout
            dist.init_process_group(backend, timeout=timedelta(seconds=min(JOIN, limit)))
            distributed_c10d._set_pg_timeout(timedelta(seconds=limit))
            self._entered.meet(JOIN)
        return True


def _kept(trainer: Any) -> Callable[[], None]:
    """Note how the Trainer is before `train`; called, the result makes it so again, but for its weights."""
    model, handler = trainer.model, trainer.callback_handler
    modes = KeptModules(model) if model is not None else None
    patched = {name for name in _OF_ACCELERATE if model is not None and name in vars(model)}
    attributes = [(owner, dict(vars(owner))) for owner in (trainer, handler, trainer.control)]
    callbacks = list(handler.callbacks)
    random = rng.RngRecorder([trainer.args.device]).snapshot()

    def reset() -> None:
        trainer.accelerator.free_memory()
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            renew_scaler(scaler)
        for owner, values in attributes:
            vars(owner).clear()
            vars(owner).update(values)
        handler.callbacks = list(callbacks)
        if model is not None and modes is not None:
            for name in set(_OF_ACCELERATE) - patched:
                vars(model).pop(name, None)
            modes.renew()
        rng.restore(rng.decode(random))

    return reset


def _cannot(before: bool) -> str:
    """Why `train` cannot be called again; empty if it can."""
    if before:
        return "it is not the first training of its script"
    if threading.current_thread() is not threading.main_thread():
        return "train() is not called on the main thread, where signals arrive"
    groups: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())
    return "the script has made process groups of its own, which cannot be made again" if len(groups) > 1 else ""
