"""Resuming at a boundary: what was still due there is replayed, then training continues with the next batch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.adapter import CheckpointError
from lastgasp.adapter.torch import (
    CHANGED,
    WORKERS,
    AuxState,
    Flags,
    decode_aux,
    give_dtypes_back,
    have_dtypes_of,
    kept_inside,
    other_ranks,
    own_aux,
    patch_group,
    restore_aux,
    start_workers,
)
from lastgasp_lightning.boundary_form import patch_groups, set_batch_progress
from lastgasp_lightning.buckets import restore_layout
from lastgasp_lightning.buffers import with_averages
from lastgasp_lightning.checkpoint_io import UNKNOWN, saved_by
from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.extra import Extra, split_extra
from lastgasp_lightning.made_up import make_up_saves, not_there, skip_second_save
from lastgasp_lightning.metric_objects import metrics_of
from lastgasp_lightning.metrics import (
    as_first,
    decode_own,
    is_behind,
    is_summed,
    of_a_new_rank,
    restore_results,
    with_others,
)
from lastgasp_lightning.metrics_again import BEGIN_ANEW, LOST_OBJECTS, restore_objects
from lastgasp_lightning.state import KEY, VERSION, LightningState
from lastgasp_lightning.tuner import set_found

log = logging.getLogger("lastgasp")

LOST_ALONE = ("what self.log had accumulated in this epoch on rank 0 without sync_dist is lost: loggers, and what "
              "watches it there, get that of another rank")  # fmt: skip
LOST = "what self.log had accumulated in this epoch on rank {} is lost: what is reduced over all ranks leaves it out"
BEHIND = ("the epoch's values of {} on rank {} lack what was logged behind the update of step {}: it was killed "
          "before it came to that")  # fmt: skip
_ALONE = ("{} watches {!r}, which each rank logs for itself: ranks go on with the best values of one of them, and may "
          "save or stop at other steps than without the fault. Log it with sync_dist=True")  # fmt: skip
_ENDS = "training ends with step %d, as it was to: trainer.should_stop was set there"
_TRAINS_ON = ("an earlier job has ended with step %d because trainer.should_stop was set; this is another job, and "
              "trains on from there. If training was to end there, do not start it again")  # fmt: skip
_DRAWN = ("the data may not be those that were due: training_step draws its batches itself, and had drawn {} in {} "
          "calls of the epoch; a resume goes on as if it had drawn one in each")  # fmt: skip
_ANEW = "the data may not be those that were due: the training data are others than those of the checkpoint"
_MADE = ("the data may not be those that were due: train_dataloader is called in each epoch "
         "(reload_dataloaders_every_n_epochs), and has returned others than before")  # fmt: skip
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Resume:
    """Brings a run back to the boundary that a checkpoint was taken at.

    Call `install` in the callback's `on_load_checkpoint`; Lightning has restored the model then, and nothing
    else. Undoes itself when the boundary is reached; `uninstall` is for a run that never gets there.

    Args:
        state: of this fit; `prepare` was called.

    Attributes:
        put_back: called at the boundary before anything else: gives back plain values, where a fit was entered again.
        bring: the same from the record of a gasp; returns what to note. gather: from all ranks, by a tag.
        reached: called at the boundary, before what was due there is replayed.
        in_place: it was, in a process that may have trained before.
        job: this one.
        goes_on: whether it is the training of the checkpoint that goes on (`LightningSelector`), not one after its end;
            the same on all ranks, which ask together. ends: it does, and was asked to stop at its boundary.
    """

    def __init__(self, state: LightningState) -> None:
        self._state = state
        self._undo: list[Undo] = []
        self._record: dict[str, Any] = {}
        self._own = Extra(b"")
        self.notes: list[str] = []
        self.put_back: Callable[[], object] = bool
        self.bring: Callable[[dict[str, Any]], str] = lambda _: ""
        self.gather: Callable[[str, bytes], Sequence[bytes]] = lambda _, own: [own]
        self.reached: Callable[[], object] = bool
        self.in_place, self.job = False, ""
        self.goes_on: Callable[[], bool] = lambda: True
        self.ends = False

    def install(self, trainer: Any, checkpoint: dict[str, Any]) -> bool:
        """Change `checkpoint` to the boundary form and arrange the replay.

        Returns:
            False if nothing is to be done: not fitting, or not a checkpoint of lastgasp; then Lightning
            resumes as it does alone, and the data start over.

        Raises:
            CheckpointError: the checkpoint is of a version that this code does not know.
        """
        record = checkpoint.get(KEY)
        if trainer.state.fn != TrainerFn.FITTING or record is None:
            return False
        if record.get("version") != VERSION:
            raise CheckpointError(
                f"the checkpoint has lastgasp state of version {record.get('version')!r}, this lastgasp reads "
                f"version {VERSION}. Install the lastgasp that wrote it, or remove checkpoint['{KEY}']."
            )
        self.uninstall()
        self._record = record
        self._state.fit.loaded(record)
        self._aux = self._choose_aux(trainer, record)
        _to_boundary(checkpoint, record)
        set_found(trainer, record.get("tuned", {}))
        extra = split_extra(self._aux.extra if self._aux is not None else b"")
        self._own = extra if trainer.global_rank in record["small"] else Extra(b"")
        self._state.position.resume(extra.position, record["epoch"], record["batch"])
        self._undo.append(restore_layout(trainer, record.get("buckets")))
        self._arrange(trainer)
        return True

    def uninstall(self) -> None:
        """Undo what is left of the arrangements. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def pending(self) -> bool:
        """A checkpoint was loaded, and the run does not stand on its boundary yet."""
        return bool(self._record)

    def _choose_aux(self, trainer: Any, record: dict[str, Any]) -> AuxState | None:
        states: dict[int, bytes] = record["small"]
        if "elastic" in record:  # which ranks there are may have changed, and no step depends on it
            self._state.position.elastic.used = record["elastic"]
            own = states.get(trainer.global_rank, states[min(states)] if states else None)
        else:
            own = own_aux(record, trainer.global_rank, trainer.world_size, self._note)
        return decode_aux(own) if own is not None else None

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._state.say(text)

    def _arrange(self, trainer: Any) -> None:
        fit = trainer.fit_loop
        fit.epoch_loop.val_loop._has_run = False
        self._undo += [
            replace_method(fit, "run", lambda run: lambda: self._run(trainer, run)),
            replace_method(fit.epoch_loop, "advance", lambda _: lambda fetcher: self._advance(trainer)),
        ]
        connector, around = trainer._checkpoint_connector, partial(partial, partial(_load_schedules, trainer))
        self._undo.append(replace_method(connector, "restore_lr_schedulers", around))
        if type(trainer.strategy).load_optimizer_state_dict is Strategy.load_optimizer_state_dict:
            load = partial(_load_optimizers, trainer)
            self._undo.append(replace_method(trainer.strategy, "load_optimizer_state_dict", partial(partial, load)))

    def _run(self, trainer: Any, run: Callable[[], None]) -> None:
        """`fit_loop.run`, once: let it in although `max_steps` is reached, because something is still due."""
        epoch = trainer.fit_loop.epoch_loop
        limit = epoch.max_steps
        if limit != -1 and epoch.global_step >= limit:
            epoch.max_steps = epoch.global_step + 1
        self._undo.append(lambda: setattr(epoch, "max_steps", limit))
        with warnings.catch_warnings():
            # the data position is restored; the warning says that it is not
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            run()

    def _advance(self, trainer: Any) -> None:
        """The first `advance`: stay at the boundary, fetch nothing. Lightning continues with `on_advance_end`."""
        record, fit = self._record, trainer.fit_loop
        self.uninstall()
        self.reached()
        self.put_back()
        if missing := self.bring(record):
            self._note(missing)
        for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
            loop._restarting = False  # else the plateau schedulers of this epoch's end are left out
        trainer.should_stop = self._asked_to_stop(trainer, record) or trainer.should_stop
        if (accumulate := record.get("accumulate")) is not None:  # callbacks change it only when an epoch starts
            trainer.accumulate_grad_batches = accumulate
        fit._last_train_dl_reload_epoch, fit.epoch_loop.val_loop._last_val_dl_reload_epoch = record["reloads"]
        loaded = trainer.strategy.broadcast(saved_by(str(trainer.ckpt_path or "")))  # all do the same
        here = {(job, record["step"]) for job in (self.job, loaded[0])}
        skip_second_save(trainer, record, here)
        for name, kind in record.get("watched_alone", ()) if trainer.world_size > 1 else ():
            self._note(_ALONE.format(kind, name))
        if missing := not_there(trainer, record):
            self._note(missing)
        _start_averaging(trainer)
        for optimizer, groups in zip(trainer.optimizers, record["param_groups"], strict=False):
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                patch_group(group, saved)  # a scheduler that is made when the epoch starts changes the learning rate
        self._restore_metrics(trainer, record)
        if note := record.get("not_saved"):
            self._note(note)
        Flags(trainer.lightning_module).restore(record.get("flags"), tell=False)
        self._state.position.settle()
        reason, ranks = self._state.position.inexact, record["world_size"]
        if ranks != trainer.world_size and "elastic" not in record:
            reason = other_ranks(ranks, trainer.world_size, record["batch"])
        if record["batch"] and reason:
            if reason == CHANGED and self.in_place:  # the loaders of a new process may be those that were due
                raise CheckpointError(f"this fit cannot go on in its process: {reason}")
            workers = "random numbers that DataLoader workers draw (augmentation) are others than without the fault"
            self._note(workers if reason == WORKERS else f"the data may not be those that were due: {reason}")
        ended = record["loops"]["epoch_loop.batch_progress"]["is_last_batch"]
        if self._state.position.anew and not ended:
            self._note(_MADE if trainer.reload_dataloaders_every_n_epochs else _ANEW)
        if record.get("drawn") not in (None, record["batch"]) and not ended:
            self._note(_DRAWN.format(record["drawn"], record["batch"]))
        if isinstance(ddp := trainer.strategy.model, DistributedDataParallel) and self._state.per_rank_buffers:
            ddp.require_forward_param_sync = False  # else its first forward pass gives all ranks those of rank 0
        validate_again(trainer, record)  # by all ranks, those too that have lost their state: it has collectives
        if self._aux is not None:
            restore_aux(self._aux, self._state._devices(), with_averages(trainer))
        if any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):
            self._note("the masks of ModelPruning are in no checkpoint of Lightning's: weights that were pruned are "
                       "trained until it prunes again, so the result differs")  # fmt: skip
        self._aux, self._record = None, {}
        self._state.resumed()
        if trainer._logger_connector._first_loop_iter is not None:
            trainer._logger_connector.update_train_step_metrics()  # Lightning logs a step behind its boundary
        if loaded != UNKNOWN or not trainer.ckpt_path:  # beside a copy's files, which are the user's, nothing is due
            make_up_saves(trainer, record, here)

    def _asked_to_stop(self, trainer: Any, record: dict[str, Any]) -> bool:
        """Whether the training of the checkpoint was asked to stop, and is what goes on.

        Who stops by the clock starts another job to train on, and nothing else tells that from a training at its goal.
        """
        if record["stopping"] or not record.get("asked_to_stop"):
            return bool(record["stopping"])
        self.ends, step = self.goes_on(), record["step"]
        if trainer.is_global_zero:
            log.warning(_ENDS if self.ends else _TRAINS_ON, step)
        return self.ends

    def _restore_metrics(self, trainer: Any, record: dict[str, Any]) -> None:
        logs = trainer._logger_connector
        device = trainer.strategy.root_device
        logs._callback_metrics.update({k: v.to(device) for k, v in record["metrics"].items()})
        rows = decode_own(self._own.accumulators) or record["results"]
        if "elastic" in record and trainer.global_rank not in record["small"]:
            if any(map(is_summed, rows)) and "left" not in record and trainer.global_rank < record["world_size"]:
                self._note(LOST.format(trainer.global_rank))
            rows = of_a_new_rank(rows)
        elif rows is record["results"] and rows and record.get("results_rank") != trainer.global_rank:
            self._note(f"the epoch's accumulators of self.log on rank {trainer.global_rank} are those of another rank")
        if "elastic" in record and trainer.is_global_zero:
            rows = with_others(rows, [decode_own(one.accumulators) for one in _gone(record, trainer.world_size)])
            as_first(rows, decode_own(_first(record).accumulators))
        if is_behind(self._own.accumulators):
            self._note(BEHIND.format("self.log", trainer.global_rank, record["step"]))
            keys = {row["key"] for row in rows}
            rows += [row for row in of_a_new_rank(record["results"]) if row["key"] not in keys]  # all must have them
        restore_results(trainer, rows)
        self._restore_objects(trainer, record)
        logs._first_loop_iter, logs._current_fx = record["logging"]
        if logs._first_loop_iter is not None:
            logs.on_batch_end()

    def _restore_objects(self, trainer: Any, record: dict[str, Any]) -> None:
        rank, names, left = trainer.global_rank, set(record.get("unsaved", ())), "left" in record
        if record.get("objects"):  # all ranks gather, those too whose module has none
            gather = partial(self.gather, f"metrics/{record['step']}")
            gone = _gone(record, trainer.world_size) if "elastic" in record and trainer.is_global_zero else []
            own, before = self._own.objects, _first(record).objects
            lost, lack, behind = restore_objects(trainer, own, gather, [one.objects for one in gone], before)
            names |= {*lack}
            if behind:
                self._note(BEHIND.format("torchmetrics objects", rank, record["step"]))
            new = "elastic" in record and (left or rank >= record["world_size"])
            if rank in lost and not new and any(metrics_of(trainer.lightning_module)):
                self._note(LOST_OBJECTS.format(rank))
        if names:
            self._note(BEGIN_ANEW.format(", ".join(sorted(names))))


def _gone(record: dict[str, Any], world_size: int) -> list[Extra]:
    """Of the ranks that there are no more."""
    missing = [data for rank, data in record["small"].items() if rank >= world_size]
    return [*map(extra_of, missing), *(Extra(b"", *one) for one in record.get("left", {}).get("gone", ()))]


def _first(record: dict[str, Any]) -> Extra:
    """Of rank 0, where that is a rank that there is no more."""
    return Extra(b"", *record.get("left", {}).get("first", ()))


def validate_again(trainer: Any, record: dict[str, Any]) -> None:
    """Have validations go on: count their batches on, for loggers, and have persistent workers of their loaders run.

    Call it before random states are restored.
    """
    loop, counted = trainer.fit_loop.epoch_loop.val_loop, record["loops"].get("epoch_loop.val_loop.batch_progress", {})
    if not (trainer.num_sanity_val_steps or counted.get("current", {}).get("ready")) or not trainer.enable_validation:
        return
    if loop._combined_loader is None and not trainer.reload_dataloaders_every_n_epochs:
        trainer.validating = True
        try:
            loop.setup_data()
        finally:
            trainer.training = True
    loop._seen_batches_per_dataloader.update(record.get("validated", {}))  # to set up data begins with none
    for loader in loop._combined_loader.flattened if loop._combined_loader is not None else ():
        start_workers(loader)


def logged(checkpoint: dict[str, Any]) -> bytes:
    """What rank 0, which logs, had logged at the boundary of `checkpoint`; empty where that is not known."""
    record = checkpoint.get(KEY, {})
    if "left" in record:
        return bytes(record["left"]["logged"])
    aux = record.get("small", {}).get(0)
    return extra_of(aux).logged if aux is not None else b""


def extra_of(aux: bytes) -> Extra:
    """The adapter's part of a rank's auxiliary state."""
    return split_extra(decode_aux(aux).extra)


def _load_schedules(trainer: Any, load: Callable[[], None]) -> None:
    with kept_inside(config.scheduler for config in trainer.lr_scheduler_configs):
        load()


def _load_optimizers(trainer: Any, load: Callable[[Any], None], checkpoint: dict[str, Any]) -> None:
    load(checkpoint)
    if have_dtypes_of(trainer.lightning_module.state_dict(), checkpoint.get("state_dict", {})):
        for optimizer, stored in zip(trainer.strategy.optimizers, checkpoint["optimizer_states"], strict=False):
            give_dtypes_back(optimizer, stored)


def _to_boundary(checkpoint: dict[str, Any], record: dict[str, Any]) -> None:
    """Replace what may be younger than the boundary by what was captured there."""
    fit = checkpoint["loops"]["fit_loop"]
    fit.update(record["loops"])
    set_batch_progress(fit["epoch_loop.batch_progress"], pending=0)
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = record["batches_that_stepped"]
    fit["state_dict"].pop("combined_loader", None)
    checkpoint["lr_schedulers"] = record["lr_schedulers"]
    checkpoint.setdefault("callbacks", {}).update(record["callbacks"])
    if "optimizer_states" in checkpoint:  # not where the strategy has loaded them already
        patch_groups(checkpoint["optimizer_states"], record["param_groups"])


def _start_averaging(trainer: Any) -> None:
    """Lightning's SWA makes its scheduler when an epoch starts, which a resume in the middle of one leaves out."""
    for callback in trainer.callbacks:
        if not isinstance(callback, StochasticWeightAveraging) or callback._initialized:
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
