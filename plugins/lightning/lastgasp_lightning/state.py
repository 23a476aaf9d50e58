"""The state of a Lightning run: captured at each boundary, dumped as a native checkpoint without a collective.

Boundary of step N: all of the batch that made update N is done, up to and including `on_train_batch_end`;
validation, plateau schedulers and the end of the epoch are still due. Every checkpoint is dumped in this form
and a resumed run replays what was due, so that it is bit-equal to the uninterrupted one.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lastgasp.adapter import NotSaveable
from lastgasp.adapter.torch import AuxRecorder, BucketLayout, buffers_of, decode_aux, digests_of, without_buffers
from lastgasp_lightning import compat
from lastgasp_lightning.boundary import UpdateWatch, before_calls, finish_batch, steps_of, wrap_batch_end
from lastgasp_lightning.boundary_form import patch_groups, set_batch_progress
from lastgasp_lightning.buffers import Exchange, are_synced, with_averages
from lastgasp_lightning.data_position import DataPosition
from lastgasp_lightning.extra import behind_position, split_extra
from lastgasp_lightning.manual import StepCopies
from lastgasp_lightning.metric_objects import OwnObjects
from lastgasp_lightning.metrics import OwnAccumulators, encode_results
from lastgasp_lightning.snapshot import Snapshot, Snapshotter
from lastgasp_lightning.thisfit import ThisFit
from lastgasp_lightning.tuner import found_by

if TYPE_CHECKING:
    from lastgasp_lightning.sharded import LightningShards

log = logging.getLogger("lastgasp")

KEY = "lastgasp"
VERSION = 1


def _nothing() -> None:
    return None


class LightningState:
    """The state of one fit. One object per `fit`; the callback calls it.

    Order: `prepare` in `setup`; `install` in `on_fit_start`; then per batch `before_update` in
    `on_before_optimizer_step` and `boundary` in `on_train_batch_end`; `annotate` in `on_save_checkpoint`;
    `finish_step` in `on_exception`; `uninstall` in `teardown` (not called by Lightning after an exception).
    `dump` is the only method that another thread may call.

    Args:
        trainer: the Trainer.
        fit: which fit of the script it is.

    Attributes:
        gate: called once per batch before parameters change, and may block.
        say: reports what is not exact (`Session.note`).
        logged: what this rank's loggers have by now (`LogRecord.mark`).
        exchange: with which averaged weights a callback validates; copies: of the step before. Both set before.
        shards: where each rank holds a part of the state; values: the `ValuesOfSteps`, if any. Set before `install`.
        completed: called for each step that `boundary` has not returned.
    """

    def __init__(self, trainer: Any, fit: ThisFit) -> None:
        self._trainer, self.fit = trainer, fit
        self.gate: Callable[[], None] = _nothing
        self._single = trainer.world_size == 1
        self._steps, self._batches = dict[str, int](), dict[str, int]()
        self.watch = UpdateWatch(self._before_first_update, self._capture_unsettled)
        self.position = DataPosition(trainer, self._devices(), fit)
        self.snapshot: Snapshot | None = None
        self._buckets = BucketLayout(lambda: trainer.strategy.model)
        self.notes: list[str] = []
        self.say: Callable[[str], None] = log.warning
        self.logged: Callable[[], bytes] = bytes
        self._recorder: AuxRecorder | None = None
        self._parts = b"", b"", b""
        self._undo: list[compat.Undo] = []
        self._dumping: set[int] = set()
        self._in_module_hook = self._hooked = self._fresh = self._later = self._faulted = False
        self.shards: LightningShards | None = None
        self.values: Any = None
        self.exchange = Exchange(_nothing, None)
        self.copies = StepCopies(None, _nothing, _nothing)
        self.completed: Callable[[int], None] = lambda step: None

    # -- life cycle ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Observe the data loaders; call in `setup`, before they are made.

        Raises:
            LightningChanged: this Lightning lacks something that is relied on.
        """
        compat.check(self._trainer)
        self.position.install()

    def install(self) -> None:
        """Allocate the crash-safe buffer, hook the optimizers. Call in `on_fit_start`. Idempotent."""
        if self._undo:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        self.fit.look_at_optimizers()
        self._snapshots = Snapshotter(trainer, self.shards is not None, self.values)
        self.moving = self._snapshots.extra.moving
        # What is copied must be what the other ranks hold live: of a step, once the module's own hook has run.
        self._hooked = is_overridden("on_train_batch_end", module)
        self._later = self.shards is not None and self._hooked
        self._accumulators, self._objects = OwnAccumulators(trainer), OwnObjects(trainer)
        self._holder = with_averages(trainer)
        self._recorder = AuxRecorder(self._devices(), self._holder, host_buffers=self._owns_buffers())
        self.watch.install(trainer)
        epoch = trainer.fit_loop.epoch_loop
        self._steps, self._batches = steps_of(epoch, self.watch.automatic), vars(epoch.batch_progress.current)
        self._undo = [
            wrap_batch_end(module, self._enter_module_hook, self._leave_module_hook),
            before_calls(epoch.val_loop, "run", self.before_side_effects),
            before_calls(trainer.fit_loop, "on_advance_end", self.before_side_effects),
            self.exchange.install(trainer),
            self._snapshots.saves.install(),
            self.copies.install(trainer, self._holder),
        ]

    def uninstall(self) -> None:
        """Remove every hook and patch; the crash-safe buffer and the last snapshot stay. Idempotent."""
        self.watch.remove()
        while self._undo:
            self._undo.pop()()
        self.position.uninstall()

    def close(self) -> None:
        """Uninstall and close the crash-safe buffer. Idempotent."""
        self.uninstall()
        if self._recorder is not None:
            self._recorder.close()

    @property
    def recorder(self) -> AuxRecorder:
        """The recorder of the auxiliary state; its `fd` is the crash-safe buffer's."""
        if self._recorder is None:
            raise NotSaveable("the fit has not started: no state was captured yet")
        return self._recorder

    def _devices(self) -> list[torch.device]:
        device = self._trainer.strategy.root_device
        return [device] if device.type != "cpu" else []

    @property
    def per_rank_buffers(self) -> bool:
        """Whether each rank has module buffers of its own: DDP was told so, or optimization is manual (facts, §1)."""
        strategy = self._trainer.strategy
        if self._trainer.world_size == 1:
            return False
        told = isinstance(strategy, DDPStrategy) and are_synced(strategy._ddp_kwargs)
        return not (told and self._trainer.lightning_module.automatic_optimization)

    @property
    def buffer_rank(self) -> int:
        """The rank whose buffers belong into the checkpoint's `state_dict`."""
        return self._trainer.global_rank if self.per_rank_buffers else 0

    def _owns_buffers(self) -> bool:
        return bool(self.buffer_rank == self._trainer.global_rank)

    def digests(self) -> dict[str, bytes]:
        """Of what all ranks hold in common; once Lightning has restored it, and DDP has broadcast rank 0's."""
        if self.shards is not None:
            return self.shards.shards.digests()
        optimizers = {f"optimizer {i}": optimizer for i, optimizer in enumerate(self._trainer.optimizers)}
        return digests_of({"model": self._trainer.lightning_module}, optimizers)

    # -- the hot path -------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """Call in `on_before_optimizer_step`: parameters are about to change."""
        self.watch.begin()

    def _before_first_update(self) -> None:
        # The update does not use the random state of just before: a rank killed in it leaves that to the others.
        self.moving.opens()
        self._capture_unsettled()
        self.gate()
        self.copies.take()

    def before_backward(self) -> None:
        """Call before each backward pass: in it the ranks' gradients meet, and the others can make the step alone."""
        if self._single:
            return
        accumulates = self.watch.automatic and self._trainer.accumulate_grad_batches != 1
        if not accumulates or not self._trainer.fit_loop.epoch_loop._should_accumulate():
            self._capture_unsettled()

    def _capture_unsettled(self) -> None:
        # Each update counts for one step, that of each optimizer as well; the last one of a batch makes its boundary.
        if not self._single and not self.watch.aside():
            self._capture_aux(self._steps["completed"] + 1, settled=False)

    def boundary(self) -> int | None:
        """Call in `on_train_batch_end`. Captures the boundary if the batch made an update.

        Returns:
            The step captured, or None when only gradients were accumulated, or when `completed` is called for it.
        """
        step = self._steps["completed"]
        snapshot = self.snapshot
        if step == 0 or (snapshot is not None and snapshot.step == step):
            return None
        self._fresh = self._hooked
        self._capture(step, fill=not self._later, settled=not self._later)
        return None if self._later else step

    def resumed(self) -> None:
        """A resumed run is at its boundary again: a fault before its first update can save it anew."""
        self._capture(self._trainer.fit_loop.epoch_loop.global_step)

    def _capture(self, step: int, fill: bool = True, settled: bool = True) -> None:
        """fill: all ranks are here, so that the arena can be filled; settled: the step counts as complete."""
        snapshot, shards = self._snapshots.take(step), self.shards
        if shards is not None:
            shards.keep(snapshot)
            if fill:
                self._capture_aux(step, settled=False)
                shards.fill(step)
        self._capture_aux(step, settled)
        self.snapshot = snapshot
        self._buckets.look()
        self.watch.close()

    def _capture_aux(self, step: int, settled: bool) -> None:
        if (recorder := self._recorder) is not None:
            recorder.extra = self.position.record(self._batches["ready"])
            done = settled and not self._fresh
            own = b"" if self._single else self._accumulators.at(done)
            parts = own, self.logged(), self._objects.at(done)
            if any(map(operator.is_not, parts, self._parts)):
                self._parts, recorder.tail = parts, behind_position(*parts)
            recorder.capture(step, settled)

    def _enter_module_hook(self) -> None:
        self._in_module_hook = True

    def _leave_module_hook(self) -> None:
        self._in_module_hook = False
        fresh, self._fresh = self._fresh, False
        if fresh and self.snapshot is not None:
            self._capture(self.snapshot.step)
            if self._later:
                self.completed(self.snapshot.step)

    def before_side_effects(self) -> None:
        """Remember callbacks' states: validation or the end of the epoch begins, and a resume replays it."""
        if self.snapshot is not None and not self._trainer.sanity_checking:
            self._snapshots.add_callbacks(self.snapshot, self.recorder.queued.mark)

    # -- after a fault ------------------------------------------------------------------------------------

    def finish_step(self) -> bool:
        """Call on the main thread in `on_exception`: bring the state to a boundary if it can be known.

        Returns:
            Whether `dump(snapshot.step)` is possible now.
        """
        self._faulted = True
        if self._in_module_hook or self._recorder is None or (self._later and self._fresh):
            return False
        if not self.watch.begun:
            return self.snapshot is not None
        if not finish_batch(self._trainer, self.watch):
            return self.copies.valid
        self.copies.over()
        step = self._trainer.fit_loop.epoch_loop.global_step
        self._note(f"step {step} was cut short on rank {self._trainer.global_rank} after its update: loggers there, "
                   "and callbacks after the one that raised, have nothing of it")  # fmt: skip
        self._capture(step, fill=False)
        return True

    def aux(self, step: int) -> bytes | None:
        """This rank's encoded auxiliary state of `step`, if it is among the last ones."""
        return self.recorder.read(step)

    def dump(self, step: int, aux: Mapping[int, bytes] | None = None) -> dict[str, Any]:
        """The native Lightning checkpoint of `step`, plus the key `"lastgasp"`. Enters no collective.

        Its tensors are the live ones: write them before training continues.

        Args:
            step: completed updates; must be the boundary that the live state stands on.
            aux: auxiliary states of ranks, where they could be had; this rank's own is added.

        Raises:
            NotSaveable: the live state is not that of `step`, or cannot be dumped without a collective.
        """
        snapshot, has_copy = self.require(step), self.copies.valid
        if missing := self._snapshots.missing(snapshot, self.exchange.done):
            self._note(missing)
        self._refuse_collectives()
        checkpoint = self.dump_live()
        if self.require(step) is not snapshot or self.copies.valid != has_copy:
            raise NotSaveable(f"step {step} ended while it was being dumped")
        self.copies.put(checkpoint, has_copy)
        own = self.recorder.read(step)
        aux_states = ({} if own is None else {self._trainer.global_rank: own}) | dict(aux or {})
        checkpoint[KEY] = self.at_boundary(checkpoint, snapshot, aux_states)
        return checkpoint

    def dump_live(self) -> dict[str, Any]:
        """Lightning's checkpoint as everything stands now."""
        self._dumping.add(threading.get_ident())  # a save's thread, and where shards are copied the training thread
        try:
            checkpoint: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(False)
            return checkpoint
        finally:
            self._dumping.discard(threading.get_ident())

    @property
    def dumping(self) -> bool:
        """Whether the calling thread is in `dump_live`."""
        return threading.get_ident() in self._dumping

    def at_boundary(self, checkpoint: dict[str, Any], snapshot: Snapshot, aux: Mapping[int, bytes]) -> dict[str, Any]:
        """Bring what `dump_live` returned to a boundary. Returns the record that goes with it."""
        self._patch(checkpoint, record := self._record(snapshot, dict(aux)), snapshot)
        return record

    def require(self, step: int) -> Snapshot:
        """The snapshot of the boundary that the live state stands on. Raises NotSaveable: it is not that of `step`."""
        snapshot = self.snapshot
        if snapshot is None:
            raise NotSaveable("no step has been completed yet")
        if self._in_module_hook:
            raise NotSaveable("the LightningModule's on_train_batch_end is running and may change weights")
        if self.watch.begun and not self.copies.valid:
            raise NotSaveable(f"the update after step {snapshot.step} has begun; step {step} is gone")
        if snapshot.step != step:
            raise NotSaveable(f"this rank is at step {snapshot.step}, not at {step}")
        return snapshot

    def _refuse_collectives(self) -> None:
        strategy = type(self._trainer.strategy)
        for name in ("lightning_module_state_dict", "optimizer_state"):
            if getattr(strategy, name) is not getattr(Strategy, name):
                raise NotSaveable(f"{strategy.__name__}.{name} may gather from other ranks, which a gasp must not")
        if any(hasattr(o, "consolidate_state_dict") for o in self._trainer.optimizers):
            raise NotSaveable("an optimizer gathers its state from other ranks (consolidate_state_dict)")

    # -- periodic checkpoints -----------------------------------------------------------------------------

    def annotate(self, checkpoint: dict[str, Any]) -> None:
        """Call in `on_save_checkpoint`, on every rank: make the checkpoint resumable bit for bit.

        Adds the key `"lastgasp"` in boundary form, wherever in the loop the save is made; the rest stays as
        Lightning made it. A resume with lastgasp goes back to the boundary and replays validation and epoch
        end, without saving again; a resume without lastgasp continues as Lightning always does. With several
        ranks their auxiliary states are gathered: such a save is a collective moment anyway. Not exact: a save
        in `on_train_batch_end` of a module that overrides this hook (Lightning saves before it), and one made
        between the update and the boundary (no key is added).
        """
        if self.dumping or self._recorder is None or "optimizer_states" not in checkpoint:
            return
        snapshot = None if self.watch.begun else self.snapshot
        own = self._recorder.read(snapshot.step) if snapshot is not None else None
        aux_states = self._gather(own)
        if snapshot is not None and (self._faulted or len(aux_states) == self._trainer.world_size):
            with contextlib.suppress(NotSaveable):  # a buffer has changed of which there is no copy
                checkpoint[KEY] = self._record(snapshot, aux_states, told=self._trainer.is_global_zero)

    def _gather(self, own: bytes | None) -> dict[int, bytes]:
        if self._faulted:  # peers may be dead
            return {self._trainer.global_rank: own} if own is not None else {}
        found: list[bytes | None] = [own]
        if self._trainer.world_size > 1:
            found = [None] * self._trainer.world_size
            torch.distributed.all_gather_object(found, own)
        return {rank: data for rank, data in enumerate(found) if data is not None}

    # -- composing ----------------------------------------------------------------------------------------

    def _record(self, snapshot: Snapshot, aux_states: dict[int, bytes], told: bool = True) -> dict[str, Any]:
        loops = self._snapshots.loops(snapshot)
        return {
            "version": VERSION,
            "step": snapshot.step,
            "boundary": "batch_end",
            "world_size": self._trainer.world_size,
            "epoch": loops["epoch_progress"]["current"]["processed"],
            "batch": loops["epoch_loop.batch_progress"]["current"]["ready"],
            "small": {r: d if self.per_rank_buffers else without_buffers(d) for r, d in aux_states.items()},
            "buffers": self._buffers(snapshot.step, aux_states, told),
            "loops": loops,
            "batches_that_stepped": snapshot.stepped,
            "accumulate": snapshot.accumulate,
            "drawn": snapshot.drawn,
            "buckets": self._buckets.layout,
            "reloads": snapshot.reloads,
            "validated": snapshot.validated,
            "asked_to_stop": snapshot.asked,
            "stopping": snapshot.stopping,
            "lr_schedulers": snapshot.schedulers,
            "param_groups": snapshot.groups,
            "callbacks": snapshot.callbacks,
            **self._snapshots.saves.known(),
            "results": encode_results(snapshot.results),
            "results_rank": self._trainer.global_rank,
            **self._objects.known(),
            "metrics": {k: v.detach().clone() for k, v in snapshot.metrics.items()},
            "logging": snapshot.logging,
            "flags": self._snapshots.flags_of(snapshot),
            "notes": list(self.notes),
            "fit": msgspec.to_builtins(self.fit.fit),
            "as_set": self.fit.settings.values if self.fit.settings is not None else None,
            "tuned": found_by(self._trainer),
        }

    def _buffers(self, step: int, aux_states: dict[int, bytes], told: bool) -> dict[str, torch.Tensor]:
        rank, size = self._trainer.global_rank, self._trainer.world_size
        if self.buffer_rank not in aux_states and self.buffer_rank != rank:
            self._note(f"buffers are this rank's, because those of rank {self.buffer_rank} were lost")
        counted = range(size) if self.per_rank_buffers else [self.buffer_rank]
        self._note(self.recorder.note_on_buffers(aux_states, rank, counted) if told else "")
        return buffers_of(step, aux_states, self.recorder, [self.buffer_rank])

    def _note(self, text: str) -> None:
        if text and text not in self.notes:  # said again with each checkpoint of the fit
            self.notes.append(text)
            self.say(text)

    def _patch(self, checkpoint: dict[str, Any], record: dict[str, Any], snapshot: Snapshot) -> None:
        """Bring the live dump to the boundary, as Lightning would have saved it in on_train_batch_end."""
        fit = checkpoint["loops"]["fit_loop"]
        fit.update(self._snapshots.loops(snapshot))
        set_batch_progress(fit["epoch_loop.batch_progress"], pending=1)
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] = snapshot.stepped
        own = record["small"].get(self._trainer.global_rank)
        if "combined_loader" in fit["state_dict"] and own is not None:
            position = split_extra(decode_aux(own).extra).position
            fit["state_dict"]["combined_loader"] = self.position.stateful_states(position)
        checkpoint["global_step"] = snapshot.step
        checkpoint["epoch"] = fit["epoch_progress"]["current"]["completed"]
        checkpoint["lr_schedulers"] = snapshot.schedulers
        checkpoint["callbacks"].update(snapshot.callbacks)
        patch_groups(checkpoint["optimizer_states"], snapshot.groups)
        self.exchange.put(checkpoint, record["buffers"], self._holder)
        self._snapshots.put(checkpoint, snapshot)
