"""The state of a Trainer at the boundary of a step: captured, dumped as `checkpoint-N`, and returned to.

Boundary of step N: everything up to the callbacks' `on_step_end` is done; logging, evaluation and saving of that step,
and the end of the epoch, are still due. A resumed run stands on the boundary and does what was due, except that no
checkpoint is written over a good one of the same step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from lastgasp import adapter
from lastgasp.adapter import NotSaveable
from lastgasp.adapter import torch as shared
from lastgasp.adapter.checkpoint import Staged
from lastgasp_transformers.files import BESIDE, VERSION, Record, bare, lacking_of, write_checkpoint
from lastgasp_transformers.losses import Found, LossSum, Own, found_in, lost, unlogged
from lastgasp_transformers.seats import Seats
from lastgasp_transformers.shares import SHARES
from lastgasp_transformers.values import MODULES, VALUES, CarriedValues, split, unsaved_of

log = logging.getLogger("lastgasp")

_STATE = ("log_history", "best_metric", "best_global_step", "total_flos", "epoch")
"""Fields of the TrainerState that change when something that was due is done."""
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
_KEPT = ("seconds", "step", "last", "in_epoch", "control", "callbacks", "sums", "evaluated")


_STARTS = ("an evaluation starts persistent workers of its data loader once more, for which the process draws a random "
           "number: those from there on are other ones than without the fault")  # fmt: skip


def evaluated(trainer: Any) -> list[str]:
    """Names of the evaluation loaders that Trainer keeps, with their workers, and has iterated."""
    if not getattr(trainer.args, "dataloader_persistent_workers", False):
        return []
    kept = getattr(trainer, "_eval_dataloaders", {}).items()
    return [name for name, one in kept if shared.runs_workers(one)]


def evaluate_again(trainer: Any, names: list[str]) -> bool:
    """Have the same loaders, with their workers, in this process. Returns whether it has all of them."""
    try:
        for name in names:
            shared.start_workers(trainer.get_eval_dataloader(None if name == "eval" else name))
    except Exception:  # given to `evaluate` itself, or made by the user's own method, which wants more by then
        log.debug("an evaluation loader cannot be made yet", exc_info=True)
        return False
    return True


def inner_of(optimizer: Any) -> Any:
    """The user's: accelerate wraps it anew in each call of train()."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def dtypes_of(model: Any) -> dict[str, torch.dtype]:
    """Of its parameters."""
    return {name: value.dtype for name, value in model.named_parameters()}


class Training(adapter.Training):
    """One call of `Trainer.train`, once everything is loaded. Implements `adapter.Training`.

    Args:
        data: what it reads.
        session: the engine's.
        fit: its number in the script.
        values: what subclasses and callbacks keep.

    Attributes:
        loaders: that give the data.
        phase: of the step under way, from its update on; empty before.
        epoch, batches: the epoch under way, and how many batches it has.
        began: when its training began (monotonic), earlier by the time that was spent before what it resumes.
        done, updates: the steps of it that are complete, and how many it has.
        norm: of the gradient of the step under way.
        last: norm of the gradient and learning rate of the last step, for its log.
        seats: where ranks are missing; None where all are there.
    """

    def __init__(
        self, trainer: Any, data: shared.PrefetchedData, place: adapter.Place, session: adapter.Session, fit: int,
        values: CarriedValues,
    ) -> None:  # fmt: skip
        self._values = values
        self._job = [place.job, fit]
        self.trainer, self._data, self._place, self._session = trainer, data, place, session
        self._optimizer = inner_of(trainer.optimizer)
        scaler = getattr(trainer.accelerator, "scaler", None)
        self.state = shared.TorchState(trainer.model_wrapped, self._optimizer, trainer.lr_scheduler, scaler)
        self.state.require_supported(place.world_size)
        self._frozen_as_set = self.state.flags.record(self.state.flags.take())["frozen"]
        if self.state.partitioned:
            name, remedy = type(self._optimizer).__name__, "Use a plain one, or take LastGasp out of the callbacks."
            raise adapter.ConfigError("optimizer", name, "one that each rank holds completely", remedy)
        steps = self._innermost()
        self.recorder = shared.AuxRecorder(self.state.devices(), self.state.container)
        self._gate = self.recorder.queued.gate(session)
        values.queued = self.recorder.queued
        self._losses = LossSum(trainer.args.device)
        self._loss, self._ahead, self._lacking = 0.0, False, False
        self._buckets = shared.BucketLayouts(self.state)
        self._unsaved = unsaved_of(trainer)
        self._unsaved_data, self._optimizers = shared.UnsavedData(), shared.UnsavedOptimizers([self._optimizer])
        self._moving = shared.MovingParameters(self.state.container, session.note, self.recorder.queued.mark)
        self.gasps: adapter.StateSource
        self.loaders: list[object] = []
        self._boundary: Record = {}
        self._resumed: Record = {}
        self._scheduled: Record = {}
        self.step, self.phase, self.epoch, self.batches = int(trainer.state.global_step), "", 0, 1
        self.done, self.updates, self.began = 0, 1, adapter.clock.monotonic()
        self.last: tuple[Any, ...] = (None, None)
        self.seats: Seats | None = None
        self.norm: Any = None
        self._handles = [steps.register_step_pre_hook(self._before_update)]
        if steps is self._optimizer:  # what wraps another one goes on when that has made its step
            self._handles.append(steps.register_step_post_hook(self._after_update))

    @property
    def source(self) -> adapter.StateSource:
        """Where a gasp gets the state from."""
        return self.gasps

    def _innermost(self) -> Any:
        """The optimizer that makes the step: others wrap it (Lookahead), and are what is saved.

        Raises:
            ConfigError: the state of one that wraps another cannot be put together.
        """
        found = outer = self._optimizer
        while isinstance(getattr(found, "optimizer", None), torch.optim.Optimizer):
            found = found.optimizer
        if found is outer:
            return found
        if [*self.state.optimizers.values()] != [outer] or "param_groups" not in outer.state_dict():
            allowed = "one whose state_dict() has param_groups, with the hooks of torch.optim.Optimizer"
            remedy = "Call Optimizer.__init__ in it, or take LastGasp out of the callbacks."
            raise adapter.ConfigError("optimizer", type(outer).__name__, allowed, remedy)
        return found

    def digests(self) -> dict[str, bytes]:
        """Of what all ranks hold in common."""
        return self.state.digests()

    def close(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()

    # -- the hot path -------------------------------------------------------------------------------------

    def before_backward(self, loss: torch.Tensor) -> None:
        """In it the ranks' gradients meet: from here on the others can complete the step without this rank."""
        trainer = self.trainer
        if self._place.world_size == 1 or not trainer.accelerator.gradient_state.sync_gradients:
            return
        steps = 1 + self.step - trainer._globalstep_last_logged
        self._losses.ahead(trainer._tr_loss, loss, trainer.args.logging_nan_inf_filter, steps)
        self._ahead = True
        self._capture_ahead(self._losses.told())

    def _before_update(self, *_: object) -> None:
        losses, before, several = self._losses, None, self._place.world_size > 1
        if not self.phase:
            self._moving.opens()
            before = losses.told() if self._ahead else None
            losses.ask(self.trainer._tr_loss)
            if several:
                before = now if (now := losses.told()) is not None else before
                self._capture_ahead(before)
        self._gate()
        if several and not self.phase and (now := losses.told()) not in (None, before):
            self._capture_ahead(now)  # all that was queued is done, so that it costs no waiting
        self.phase, self._scheduled = "update", self.trainer.lr_scheduler.state_dict()

    def _after_update(self, *_: object) -> None:
        self.phase = "updated"

    def before_completed(self) -> None:
        """A step is about to be completed; one whose update a GradScaler has skipped has not come to the gate yet.

        Nor has one that was updated within the backward pass by an optimizer whose `step` nobody calls (LOMO).

        Raises:
            Released: a recovery took place.
        """
        if not self.phase:
            self._moving.opens()
            self._gate()

    def updated(self) -> None:
        """Trainer's optimizer has made its step, if it was not left out."""
        if self.phase:
            self._after_update()

    def completed(self, last: tuple[Any, ...]) -> int:
        """The step is complete: capture it. Returns its number."""
        trainer = self.trainer
        self.step, self.last, self.done = int(trainer.state.global_step), last, self.done + 1
        self._loss, self._ahead, self._lacking = self._losses.of(trainer._tr_loss), False, False
        self._capture(self.step, True, Own(self._loss, *self._place_now()))
        self._values.take(self.step)
        self._boundary = {
            "step": self.step,
            "last": last,
            "in_epoch": (self.epoch, self.done, self.updates),
            "seconds": adapter.clock.monotonic() - self.began,
            "state": vars(trainer.state) | {"log_history": list(trainer.state.log_history)},
            "control": dict(vars(trainer.control)),
            "callbacks": [(type(one).__name__, one.state()) for one in self._exportable()],
            "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            "torch": self.state.snapshot(self.step, 0),
            "evaluated": evaluated(trainer),
        }
        if self._unsaved_data.new:
            self._unsaved_data.look_at(self.loaders)
        self._buckets.look()
        self._moving.closes(self.step)
        self.recorder.queued.mark()  # a gasp reads what was copied since `capture`, too
        self.phase = ""
        return self.step

    @property
    def trained(self) -> bytes:
        """Which parameters were at the end of the last step (`Flags.take`)."""
        flags: tuple[bytes, ...] = self._boundary["torch"].flags
        return flags[0]

    def evaluates(self) -> None:
        """An evaluation is due, which may put other weights into the model."""
        self._moving.aside()

    def evaluating(self) -> None:
        """A batch of it was made."""
        self._moving.in_aside()

    def _capture_ahead(self, loss: float | None) -> None:
        """Of the step whose update is due. `loss`: None where the device has not told it."""
        self._lacking = loss is None
        if loss is None:  # that of the steps before, if it was not just logged
            loss = self._loss if self.step > self.trainer._globalstep_last_logged else 0.0
        now = self._place_now()
        self._capture(self.step + 1, False, Found(loss, *now, lacking=True) if self._lacking else Own(loss, *now))

    def _place_now(self) -> tuple[float, Any]:
        return float(self.trainer.current_flos), self._data.position

    def _capture(self, step: int, settled: bool, own: Own) -> None:
        own = own if self.seats is None else self.seats.recorded(own)
        own.rows = len(self.trainer.state.log_history)
        self.recorder.extra = msgspec.msgpack.encode(own)
        self.recorder.capture(step, settled)

    def _exportable(self) -> list[Any]:
        return [one for one in self.trainer.callback_handler.callbacks if isinstance(one, ExportableState)]

    # -- dump ---------------------------------------------------------------------------------------------

    @property
    def known(self) -> bool:
        """Whether `record` has anything. Before the first step it has only what was resumed from."""
        return bool(self._boundary or self._resumed)

    def record(self, aux: Mapping[int, bytes]) -> Record:
        """What lastgasp puts into a checkpoint of the boundary, besides what Trainer does."""
        if not self._boundary:
            return self._resumed
        boundary, (aux, values) = self._boundary, split(aux)
        return {name: boundary[name] for name in _KEPT} | {
            "version": VERSION,
            "job": self._job,
            "world_size": self._place.world_size,
            "small": {rank: data for rank, data in aux.items() if data},
            VALUES: values,
            "state": {name: boundary["state"][name] for name in _STATE},
            "groups": boundary["torch"].groups,
            "schedulers": boundary["torch"].schedulers,
            "buckets": self._buckets.layouts,
            "flags": self.state.flags.record(boundary["torch"].flags),
            "dtypes": dtypes_of(self.trainer.model),
            "frozen_as_set": self._frozen_as_set,
            "as_set": self.state.as_set.values,
            **({} if self.seats is None else {SHARES: self.seats.shares}),
            "not_saved": "; ".join(filter(None, (self._of_others(aux), lost(aux), *self._missing(values)))),
        }

    def record_beside(self, path: Path, aux: Mapping[int, bytes]) -> Record:
        """The same for a checkpoint that Trainer itself has written there, of what the model is now."""
        lacking = lacking_of(path, self.trainer, bare(self.trainer).state_dict(), self._optimizer)
        return self.record(aux) | {BESIDE: lacking, MODULES: self._values.held.changed()}

    def write(self, staged: Staged, step: int, aux: Mapping[int, bytes]) -> None:
        """Write `checkpoint-N`. Enters no collective; called while no update can begin.

        Raises:
            NotSaveable: this rank's state is not that of `step`.
            OSError: the disk refused.
        """
        boundary, rank = self._require(step), self._place.rank
        aux, values = split(aux)
        if own := self.recorder.read(step):
            aux = {**aux, rank: own}
        which = shared.which_weights([self._optimizer.param_groups])
        exchanged = which != shared.which_weights(boundary["torch"].groups)  # by an evaluation: saved as it is
        held, moved = ({}, "") if exchanged else (self._moving.held(step), self._moving.missing(step))
        dump = self.state.dump(boundary["torch"], shared.buffers_of(step, aux, self.recorder, [rank]) | held, None)
        lacking = moved, self._of_others(aux), lost(aux), unlogged(aux, rank), *self._missing(values)
        for missing in filter(None, lacking):
            self._session.note(missing)
        callbacks = dict([*boundary["callbacks"], ("TrainerControl", {"args": boundary["control"], "attributes": {}})])
        more = {VALUES: values, MODULES: self._values.held.changed(), "not_saved": ""}
        write_checkpoint(staged, self.trainer, dump, self.record(aux) | more,
                         boundary["state"] | {"stateful_callbacks": callbacks})  # fmt: skip
        if self._require(step) is not boundary:
            raise NotSaveable(f"step {step} ended while it was being written")
        if shared.which_weights([self._optimizer.param_groups]) != which:
            raise NotSaveable(shared.EXCHANGED)

    def _of_others(self, aux: Mapping[int, bytes]) -> str:
        rank, size = self._place.rank, self._place.world_size
        counted = range(size) if self.state.per_rank_buffers(size) else [0]
        return self.recorder.note_on_buffers(aux, rank, counted)

    def _missing(self, values: Mapping[int, bytes]) -> list[str]:
        found = *self._values.missing(values, self._unsaved), self._unsaved_data.note(), self._optimizers.note()
        return [note for note in found if note]

    def _require(self, step: int) -> Record:
        if self._boundary.get("step") != step:
            raise NotSaveable(f"this rank is at step {self.step}, not at {step}")
        if self.phase:
            raise NotSaveable(f"the update after step {step} has begun; step {step} is gone")
        return self._boundary

    # -- back to a boundary -------------------------------------------------------------------------------

    def restore(self, record: Record, own: bytes | None) -> shared.PrefetchedPosition | None:
        """Stand on the boundary of `record`. Returns where this rank stood in its data, if that is known."""
        trainer, waiting = self.trainer, self._exportable()
        self._resumed = copy.deepcopy(record | {MODULES: {}})  # what is due may add to it, as to the log
        self.last = record["last"]
        vars(trainer.state).update(record["state"])
        self._restore_control(record)
        vars(trainer).update(record["sums"])
        for kind, saved in record["callbacks"]:
            for callback in [one for one in waiting if type(one).__name__ == kind][:1]:
                waiting.remove(callback)
                vars(callback).update(saved["attributes"])
        shared.load_schedules(zip(self.state.schedulers.values(), record["schedulers"], strict=True))
        for group, values in zip(self._optimizer.param_groups, record["groups"][0], strict=True):
            shared.patch_group(group, values)
        for told in self._values.restore(record, self._is_of_this_job(record)):
            self._session.note(told)
        self._buckets.restore(record["buckets"])
        self._restore_flags(record)
        if missing := record.get("not_saved"):  # of Trainer's own save; of a gasp it was said with the fault
            self._session.note(missing)
        if own is None:
            return None
        if record.get("evaluated") and not evaluate_again(trainer, record["evaluated"]):
            self._session.note(_STARTS)
        aux = shared.decode_aux(own)
        shared.restore_aux(aux, self.state.devices(), self.state.container)
        mine = found_in(aux.extra) if self.seats is None else self.seats.begin(record)
        trainer._tr_loss.fill_(mine.loss)
        self._loss = mine.loss
        trainer.current_flos = mine.flos
        return mine.data

    def _restore_flags(self, record: Record) -> None:
        """What a new job freezes otherwise than the one before, which had left it as it was, is what is wanted."""
        flags, again = record.get("flags"), self._is_of_this_job(record)
        if flags is not None and not again and flags["frozen"] == record.get("frozen_as_set"):
            flags = flags | {"frozen": self._frozen_as_set}
        if flags is not None:  # what evaluates now is put into training mode anyway
            now = self.state.flags.record(self.state.flags.take())
            self.state.flags.restore(now | {"frozen": flags["frozen"]}, tell=not again)
        self.state.flags.restore(flags, tell=False)

    def _is_of_this_job(self, record: Record) -> bool:
        return bool(self._place.restarted and record.get("job") == self._job)

    def _restore_control(self, record: Record) -> None:
        """The end of another job, or fit, is no end of this one; nor is an evaluation due that it does not want."""
        state, control = self.trainer.state, self.trainer.control
        vars(control).update(record["control"])
        if not self._is_of_this_job(record):
            control.should_training_stop = state.global_step >= state.max_steps
            control.should_evaluate &= self.trainer.args.eval_strategy != "no"
        elif control.should_training_stop and state.global_step < state.max_steps:
            self._session.note(f"the job ends at step {state.global_step} again: its callbacks had ended the training")

    # -- after a fault ------------------------------------------------------------------------------------

    def settle(self, cause: str) -> str:
        """As `adapter.Training` says: a step whose update is done is completed."""
        if self.phase == "update":
            return "raised inside the update, so the state is between two steps"
        if not self.phase:
            with suppress(RuntimeError):  # of the device
                if self._lacking and (loss := self._losses.told()) is not None:
                    self._capture_ahead(loss)
            return ""
        trainer = self.trainer
        if trainer.state.global_step == self.step:
            if trainer.lr_scheduler.state_dict() == self._scheduled and "best" not in self._scheduled:
                trainer.lr_scheduler.step()
            consumed = (self.done + 1) * trainer.args.gradient_accumulation_steps
            trainer.state.epoch = self.epoch + min(consumed, self.batches) / self.batches
            trainer.state.global_step += 1
        trainer.control = DefaultFlowCallback().on_step_end(trainer.args, trainer.state, trainer.control)
        self._session.step_completed(self.completed((self.norm, self._scheduled["_last_lr"][0])))
        self._session.note(f"step {self.step} was cut short after its update by {cause}: callbacks have nothing of it")
        return ""
