"""Recovery in place: `Trainer.train` is entered again in the same process, from the checkpoint that was just saved."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from torch.distributed import distributed_c10d

from lastgasp.adapter import AdapterRun, cause_of, recovery_here
from lastgasp.adapter.again import Fewer, Recovery
from lastgasp.adapter.torch import AsSet, EnteredFromFiles
from lastgasp_transformers.kept import KeptTrainer
from lastgasp_transformers.numbers import number_anew
from lastgasp_transformers.script_alone import comes_to_training

_trained = False


class TrainAgain:
    """One call of `train` by the user, and how often it is made again.

    Args:
        asked: what the user has said about it; None: nothing.
    """

    def __init__(self, trainer: Any, asked: Recovery | None) -> None:
        global _trained
        self._trainer, self._asked = trainer, asked is not None
        self._recovery = recovery = recovery_here(asked, str(trainer.args.device), PartialState().backend or "")
        before, _trained = _trained, True
        why = _cannot(before)
        self._kept: KeptTrainer | None = None
        if recovery in ("auto", "retry", "replace") and not why:
            try:
                self._kept = KeptTrainer(trainer)
            except Exception as error:  # of the user's objects; it costs the recovery in place and not the job
                why = f"what the Trainer is before train() cannot be kept ({cause_of(error)})"
        self._as_set: AsSet | None = None
        self._entered = EnteredFromFiles(why, None if self._kept is None else self._kept.values)
        comes_to_training()

    def offer(self, life: AdapterRun, fewer: Fewer) -> None:
        """Say how a fault may be answered, before training begins."""
        self._entered.offer(life, self._recovery, self._asked, fewer=fewer)

    def set_before(self, now: AsSet) -> AsSet:
        """What the script had set when `train` was entered first. Optimizers that are the user's have trained since."""
        self._as_set = self._as_set or now
        return self._as_set

    def meet(self) -> None:
        """In a process that has taken the place of a rank: no collective before all others are in `train`, too.

        One for a missing rank waits here until it is taken in.

        Raises:
            DeadlineExceeded: one was not in time.
            SystemExit: there is no place for this process any more.
        """
        if self._entered.wait():
            dist.destroy_process_group()  # a stand-in
            self._make_group()
        elif self._entered.new and dist.is_initialized():
            self._entered.meet(self._entered.patience)

    def _make_group(self) -> None:
        if (backend := PartialState().backend) is not None:
            limit = self._trainer.args.ddp_timeout
            dist.init_process_group(backend, timeout=timedelta(seconds=min(self._entered.patience, limit)))
            distributed_c10d._set_pg_timeout(timedelta(seconds=limit))
            number_anew(self._trainer)
            self._entered.meet(self._entered.patience)

    def goes_on(self, error: BaseException) -> bool:
        """Whether `train` is to be called again; nothing of the call that has raised `error` is left then.

        Raises:
            RuntimeError, DeadlineExceeded: the other ranks did not come in time; the step is on disk.
        """
        trainer, kept = self._trainer, self._kept
        wrapped = [trainer.model_wrapped] if trainer.model_wrapped is not trainer.model else []
        if kept is None or not self._entered.goes_on(error, kept.reset, wrapped):
            return False
        self._make_group()
        return True


def _cannot(before: bool) -> str:
    """Why `train` cannot be called again; empty if it can."""
    if before:
        return "it is not the first training of its script"
    if threading.current_thread() is not threading.main_thread():
        return "train() is not called on the main thread, where signals arrive"
    groups: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())
    return "the script has made process groups of its own, which cannot be made again" if len(groups) > 1 else ""
