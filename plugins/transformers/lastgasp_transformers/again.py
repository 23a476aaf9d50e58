"""Recovery in place: `Trainer.train` is entered again in the same process, from the checkpoint that was just saved."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from torch.distributed import distributed_c10d

from lastgasp.adapter import AdapterRun
from lastgasp.adapter.again import Recovery
from lastgasp.adapter.torch import EnteredFromFiles
from lastgasp_transformers.kept import KeptTrainer

JOIN = 60.0
"""Seconds that a new process may take to `train`. The job restarts where the script prepares its data for longer, or
waits there for other ranks (`main_process_first`)."""
_trained = False


class TrainAgain:
    """One call of `train` by the user, and how often it is made again."""

    def __init__(self, trainer: Any, recovery: Recovery) -> None:
        global _trained
        self._trainer, self._recovery = trainer, recovery
        before, _trained = _trained, True
        why = _cannot(before)
        wanted = recovery in ("auto", "retry", "replace") and not why
        self._kept = KeptTrainer(trainer) if wanted else None
        self._entered = EnteredFromFiles(why, None if self._kept is None else self._kept.values)

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
        trainer, kept = self._trainer, self._kept
        wrapped = [trainer.model_wrapped] if trainer.model_wrapped is not trainer.model else []
        if kept is None or not self._entered.goes_on(error, kept.reset, wrapped):
            return False
        if (backend := PartialState().backend) is not None:
            limit = trainer.args.ddp_timeout
            dist.init_process_group(backend, timeout=timedelta(seconds=min(JOIN, limit)))
            distributed_c10d._set_pg_timeout(timedelta(seconds=limit))
            self._entered.meet(JOIN)
        return True


def _cannot(before: bool) -> str:
    """Why `train` cannot be called again; empty if it can."""
    if before:
        return "it is not the first training of its script"
    if threading.current_thread() is not threading.main_thread():
        return "train() is not called on the main thread, where signals arrive"
    groups: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())
    return "the script has made process groups of its own, which cannot be made again" if len(groups) > 1 else ""
