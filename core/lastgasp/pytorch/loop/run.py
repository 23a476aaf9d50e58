"""The work behind a `Session`: install hooks, capture steps, answer faults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lastgasp.adapter.policy import SelectionPolicy
from lastgasp.adapter.run import AdapterRun, Framework
from lastgasp.adapter.selection import CheckpointSelector
from lastgasp.arena_filling import ArenaMode
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig, Recovery, check_writable
from lastgasp.errors import NotSaveable, UsageError
from lastgasp.fits import FITS
from lastgasp.gasp.rank_status import Released
from lastgasp.pytorch import exception_origin, rng
from lastgasp.pytorch.aux_state import NOTHING, AuxRecorder, AuxState, Since, restore_aux
from lastgasp.pytorch.gasp_source import GaspSource
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop import again, files
from lastgasp.pytorch.loop.again_here import users_handler
from lastgasp.pytorch.loop.copies import Copies
from lastgasp.pytorch.loop.data_pass import DataPass
from lastgasp.pytorch.loop.data_position import DataPosition
from lastgasp.pytorch.loop.dump import dump
from lastgasp.pytorch.loop.faults import install_faults
from lastgasp.pytorch.loop.finish import finish_step, step_left
from lastgasp.pytorch.loop.inexact import LATE, Inexact
from lastgasp.pytorch.loop.marks import LoopMarks
from lastgasp.pytorch.loop.not_saved import NotSaved
from lastgasp.pytorch.loop.optimizer_update import OptimizerUpdate
from lastgasp.pytorch.loop.outside import OtherOptimizers, UnseenUpdates, require_held, require_same, watch_replicas
from lastgasp.pytorch.loop.own_loads import OwnLoads
from lastgasp.pytorch.loop.periodic import Joined, Periodic
from lastgasp.pytorch.loop.ranks import connect, kind_of, local, place_of, versions
from lastgasp.pytorch.loop.record import KEY, Buckets, aux_of, checkpoint_at, position_of
from lastgasp.pytorch.loop.schedules import watch_schedules
from lastgasp.pytorch.loop.sharding import sharded_loop
from lastgasp.pytorch.loop.state import Snapshot, TorchState
from lastgasp.pytorch.loop.thisfit import this_fit
from lastgasp.pytorch.loop.unknown_loaders import UnknownLoaders
from lastgasp.pytorch.moving import MovingParameters
from lastgasp.pytorch.one_pass import OnePass
from lastgasp.replicas import Digests
from lastgasp.steps.settings import MarksConfig
from lastgasp.testing import faults

log = logging.getLogger("lastgasp")

BUFFERS_OF_ALL = 32 << 20
"""Limit in bytes for the buffers of all ranks in a checkpoint, if those of rank 0 suffice for the next step."""


class Run:
    """One session's work. The engine's threads call `dump` and `recorder.read`, the training thread all others.

    Args:
        state: the user's; config: the engine's settings; marks: what is marked.
        every: steps between periodic checkpoints; 0 makes none.
        how: a fault may be answered in place, and which steps of a sharded model are copied.

    Attributes:
        step: completed steps; every: steps between periodic checkpoints.
        shards: what there is to do about a sharded model; None for any other.
        resumed: the checkpoint that was loaded; None at a start from scratch.
        life: connects, begins, ends; engine: its session.
    """

    def __init__(
        self, state: TorchState, config: GaspConfig, marks: MarksConfig, every: int, how: tuple[Recovery, ArenaMode]
    ) -> None:
        self.state, self.config, self.every = state, config, every
        self.recovery: Recovery = how[0]
        self.place = place_of(state.groups)
        self.rank, self.step = self.place.rank, 0
        self.resumed: Path | None = None
        state.require_supported(self.place.world_size)
        require_held(state)
        if not self.place.incarnation:
            check_writable(config.directory)
        self.entry = again.current()
        held = self.entry.take() if self.entry is not None else None
        self.fit, not_kept = this_fit(state, config.directory, None if held is None else held.fit)
        own = state.per_rank_buffers(self.place.world_size)
        # DDP broadcasts rank 0's in the next forward pass; until then an evaluation sees each rank's own.
        self.per_rank = own or state.buffer_bytes() * self.place.world_size <= BUFFERS_OF_ALL
        self.buffer_rank = self.rank if own else 0
        counts = self.per_rank or self.buffer_rank == self.rank
        self.book = DataPosition(rng.RngRecorder(state.devices()), state.sampler)
        self.buckets = Buckets(state)
        self._aux: AuxState | None = None
        self._returning = self._gradients = self._wanted = False
        self._snapshot: Snapshot | None = None
        self._again: Callable[[], None] = lambda: None
        self.users_handler = users_handler(held)
        framework = Framework(
            name=f"pytorch {torch.__version__}", kind_of=kind_of, device=local(self.place)[0], versions=versions()
        )
        writer = ManifestWriter(state.layout.FORMAT, self.place, lambda: self.fit)
        self.recorder = AuxRecorder(state.devices(), state.container, host_buffers=counts)
        make = partial(AdapterRun, framework, config, marks)
        try:
            self.life = held.life if held and held.life else make(self.place, connect(self.place))
        except BaseException:
            self.recorder.close()
            raise
        if held is not None and held.life is None:  # ranks are given what others hold only where all are alike
            self.life.alike_before = True
        self.engine, note = self.life.session, self.life.session.note
        self._inexact, self.unknown_loaders = Inexact(self.rank, note, bool(held and held.life)), UnknownLoaders(note)
        self.life.on_close(self.recorder.close, last=True)
        self.life.on_close(self.book.close)
        self._account(not_kept)
        self.shards, again_here = sharded_loop(self, writer, how[1])
        self.source: Any = self.shards or GaspSource(
            lambda staged, step, aux: save_verified(self.dump(step, aux), staged),
            lambda step: files.gasp_path(config.directory, step, self.fit.number), files.LAYOUT,
            recorder=self.recorder, writer=writer, config=config, alike=lambda: self.life.alike,
        )  # fmt: skip
        self._joined = Joined(self.engine, config, state)
        self._periodic = Periodic(self.engine, writer, config, self.fit.number)
        self._again_here = again_here(self, partial(make, backend=self.engine.backend), writer, held)
        try:
            self._start()
        except BaseException as error:
            self.life.failed(error)
            raise

    def _account(self, not_kept: str) -> None:
        """Of this training and those before it in the script."""
        status, directory = self.engine.status, self.config.directory
        self.life.on_completed(lambda: FITS.end(directory, status.durable >= status.step))
        if not_kept and self.rank == 0:
            self.engine.note(f"{not_kept}. s.save() at the end keeps it")

    # -- start --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        state, life = self.state, self.life
        require_same(state, self.engine.gather)
        self._own_loads = OwnLoads(state, self.engine.note)
        self.schedules = watch_schedules(state, life, self.shards is None)
        self._begin_with()
        self._gate = self.recorder.queued.gate(self.engine)
        if self.shards is not None:
            self.shards.started()
        # MindIO counts updates itself, so that a step cannot be left between its updates.
        useful = self.engine.backend.backend == "embedded" and self.shards is None
        copies = Copies(state.modules.values(), list(state.optimizers.values())) if useful else None
        models, events = list(state.models.values()), (self._opens, self._safe, self._capture_unsettled)
        self.update = OptimizerUpdate(list(state.optimizers.values()), models, copies, events)
        self.update.begins = lambda: state.begins(self._snapshot)
        life.on_close(self.update.remove)
        self._others = OtherOptimizers(state, self.update, lambda: self.step, self.engine.note)
        life.on_close(self._others.remove)
        self._unseen = UnseenUpdates(state, self.engine.note)
        self._replicas = watch_replicas(state, life)
        self.not_saved = NotSaved(state, self._again_here.kept, self.engine.note)
        self.moving = MovingParameters.of(state, self.engine.note, self.recorder.queued.mark)
        self.marks = LoopMarks(state, self.engine, self.step + 1, self._backward_over, self.not_saved.backward_begins)
        life.on_close(self.marks.close)
        life.on_close(self.not_saved.remove)
        life.on_close(install_faults(self))
        again_here, device = self._again_here, str(next(iter(state.devices()), "cpu"))
        again_here.ready()
        life.bind(self)
        life.begin(self.step, durable=again_here.durable(self.step), users_handler=self.users_handler, device=device)
        self._restore_aux()  # a loop that never asks for batches or epochs comes to no other place
        if self.book.nowhere:
            self.book.forget()
            self._returned()
        self._own_loads.resumed(self.resumed)

    def _begin_with(self) -> None:
        """Fill the state from memory where the training was entered again, else from the newest checkpoint."""
        if self._again_here.fill():
            return
        config, layout = self.config, self.state.layout.LAYOUT
        policy = SelectionPolicy(config, self.place, [config.directory], layout, fit=self.fit, note=self.engine.note)
        policy.preload = OnePass(self.fit)
        selector = CheckpointSelector(policy, self.engine.gather, exception_origin.is_about_content)
        if self.shards is not None and self.shards.begin_with(selector):
            return
        found = selector.load(lambda one: self._load(one.path, selector.named, policy))
        self.source.present = selector.present
        if found is not None and policy.unnumbered:
            FITS.resumed_unnumbered(config.directory, found.path)

    def _load(self, path: Path, named: bool, policy: SelectionPolicy) -> None:
        checkpoint, other = checkpoint_at(path, policy.preload), None if named or not policy.several else path
        self.state.as_set.tell(checkpoint[KEY].get("as_set"), self.engine.note, other)
        self.fill(checkpoint, path)
        if not named:
            self._own_loads.require_older(path, self.place.restarted)

    def fill(self, checkpoint: dict[str, Any], path: Path, shards: Callable[[], None] | None = None) -> None:
        """Take over the state of a checkpoint; where the loop comes to its place in the data, random state as well.

        `shards` fills those of a sharded model; by default from `path`.
        """
        self.state.load(checkpoint, str(path), shards)
        place, record, self._returning = self.place, checkpoint[KEY], True
        self._aux = aux_of(record, place, str(path), self.state.noting(self.engine.note))
        self._again = self.schedules.resumed(self.state.remember(checkpoint), record, self.engine.note)
        self.step, self.resumed = checkpoint["step"], path
        self.book.resume(position_of(record, place), checkpoint["epoch"], (record["world_size"], place.world_size))
        self.buckets.restore(record["buckets"])
        if self.rank == 0:
            log.warning("resumed from %s: step %d, epoch %d", path, self.step, self.book.epoch)

    def at_boundary(self) -> None:
        """A resumed run is back at its position: restore random state, and what the loop may have changed."""
        self._again()
        self._restore_aux()
        self._returned()

    def _restore_aux(self) -> None:
        if self._aux is not None:
            restore_aux(self._aux, self.state.devices(), self.state.container)

    def _returned(self) -> None:
        """From here on nothing is restored any more."""
        self._aux, self._returning, self._again = None, False, lambda: None

    def _trains_before_its_data(self) -> None:
        """A resumed loop changes parameters before it has returned to its position: it rarely asks for data."""
        if self.book.forget():
            log.warning("the checkpoint was taken in the middle of a pass of s.batches(), and this loop trains before "
                        "it has begun that pass: it will begin at its first batch, so the result will differ. Use the "
                        "loop that was used before.")  # fmt: skip
        self._returned()

    # -- a step -------------------------------------------------------------------------------------------

    def _opens(self) -> None:
        if self._returning:
            self._trains_before_its_data()
        self._own_loads.opens()
        self.moving.opens()
        self._capture_unsettled()
        self._gate()
        self.schedules.opens(self.book.epoch)

    def _backward_over(self) -> None:
        """The other ranks may have all gradients now, and complete the step without this one."""
        self._gradients = True
        self._capture_unsettled()

    def _capture_unsettled(self) -> None:
        """Record this rank's part of the current step for those who complete it, in case this rank dies first.

        The update itself uses none of it. In a job of one rank nobody would be left.
        """
        if self.place.world_size > 1:
            self.capture_aux(self.step + 1, settled=False)

    def _safe(self) -> None:
        """A copy of the state before the update is complete: it can be saved whatever happens in this step."""
        self.recorder.queued.mark()
        self.engine.status.inside = False

    def body_over(self) -> None:
        """The loop's body has ended: if it made a step, that step is complete.

        Raises:
            Released: a recovery took place.
        """
        if self.update.in_progress:
            faults.fire_at("step_end", self.step)
            self.complete(self.step + 1)
        else:
            self._unseen.no_update(self.step)

    def complete(self, step: int) -> None:
        """`step` is complete: capture it; write a checkpoint if one is due."""
        if self.update.has_copy:
            self._gate()  # from the copy to the live state
        due = self._wanted or (self.every > 0 and step // self.every > self.step // self.every)
        with step_left(self, step, due):
            self._capture(step, due)
        self.marks.step_end(step)
        if due:
            self.save()

    def _capture(self, step: int, saved: bool) -> None:
        if self.shards is None:
            since = self.capture_aux(step, settled=True)
            self._snapshot = self.state.snapshot(step, self.book.epoch, whole=saved)
        else:
            self._snapshot = self.state.snapshot(step, self.book.epoch)
            since = self.shards.complete(self._snapshot)
        self.buckets.look()
        self.moving.closes(step)
        self.step, self._gradients = step, False
        self.not_saved.step_over()
        self.schedules.closes(step)
        self.update.close(since)
        self.recorder.queued.mark()  # once more: what was copied since
        self.engine.step_completed(step)
        self._again_here.forget()
        self._others.step_over()
        self._replicas.step_over(self._snapshot.flags[0])

    def capture_aux(self, step: int, settled: bool, at_end: bool = False, cut: bool = False) -> Since:
        """Record the auxiliary state; `at_end`: not settled, but the step's rest is done; `cut`: that will never be.

        Returns what happened since the last capture.
        """
        extra = self.state.extra_digest() if (settled or at_end) and self.place.world_size > 1 else b""
        self.recorder.extra = self.book.record((cut or not (settled or at_end)) and self.update.more_to_come, extra)
        self.recorder.capture(step, settled)
        return self.recorder.since() if (settled or at_end) and self.place.world_size > 1 else NOTHING

    # -- data ---------------------------------------------------------------------------------------------

    def begin_pass(self, loader: Any, replay: bool) -> DataPass:
        """A pass over `loader` begins, or continues where a resumed run was."""
        book = self.book
        self.not_saved.takes(loader)
        if self.entry is not None:
            self.entry.takes(loader)
        if counted := book.before_begin():
            self.body_over()
        self._inexact.counts(loader, counted, book.epochs_used)
        if self.update.in_progress and book.nested():
            raise UsageError("a loop over s.batches() begins in the body of another, after an update there: "
                             "a resume could not continue there. Move the update behind the inner loop.")  # fmt: skip
        random = self.recorder.snapshot_rng() if self._returning and book.gave else b""
        one, there = book.begin(loader, replay)
        if there:
            self.at_boundary()
        elif self._returning and one.resumed and one.parent is None and not one.again:
            self._restore_aux()
        if random and one.parent is None:  # a loader beside this one has given its batch already, and drawn for it
            rng.restore(rng.decode(random))
        self._inexact.tell(one, there)
        return one

    def next_batch(self, one: DataPass, finished: Callable[[], bool]) -> Any:
        """The next batch; the loop's body for the previous one has ended.

        Raises:
            StopIteration: there is none, or `max_steps` is reached.
            Released: a recovery took place.
        """
        if self.book.ask(one) and self._snapshot is not None:
            self._snapshot.notes.append(LATE)
        try:
            self.body_over()
            if finished():
                raise StopIteration
            self.marks.fetching()
            faults.fire_at("data", self.step)
            batch = self.book.fetch(one)
        except StopIteration:
            self.marks.fetched(False)
            self.moving.aside()
            raise
        finally:
            one.asking = False
        self.marks.fetched(True)
        return batch

    def pass_broken(self, one: DataPass) -> None:
        """The loop has left this pass by `break`: its body is over, and it gives nothing more.

        Called while an object is destroyed, so nothing can be raised: a recovery in progress stops the loop the next
        time that it calls the session.
        """
        one.asking = True
        try:
            self.book.end(one)
            self.body_over()
            self.moving.aside()
        except Released:
            log.debug("the loop was left during a recovery")
        except Exception:
            log.exception("the end of the loop could not be captured")
        finally:
            one.asking = False

    # -- periodic checkpoints -----------------------------------------------------------------------------

    def want_save(self) -> None:
        """Request a checkpoint of the step under way, or of the last one if none is."""
        if self.update.in_progress or self._snapshot is None:
            self._wanted = True
        else:
            self.save()

    def save(self) -> None:
        """Write a periodic checkpoint of the last step; all ranks call it at the same one."""
        self._wanted = False
        step, own = self.step, self.recorder.read(self.step)
        with self.marks.saving():
            if not self._joined.wait(step):
                return
            if self.shards is not None:
                self.shards.save_periodic(step)
                return
            self._periodic.save(step, own or b"", lambda aux_states: self.dump(step, aux_states))

    # -- dump ---------------------------------------------------------------------------------------------

    def dump(self, step: int, aux: Mapping[int, bytes]) -> dict[str, Any]:
        """As `loop.dump.dump`."""
        return dump(self, step, aux)

    def require(self, step: int) -> Snapshot:
        """What was captured at the end of `step`. Raises NotSaveable: this rank's state is not that of `step`."""
        snapshot = self._snapshot
        if snapshot is None or snapshot.step != step:
            raise NotSaveable(f"this rank is at step {self.step if snapshot is None else snapshot.step}, "
                              f"not on {step}")  # fmt: skip
        if self.update.in_progress and not self.update.has_copy:
            raise NotSaveable(f"the update after step {snapshot.step} has begun; step {step} is gone")
        return snapshot

    # -- end ----------------------------------------------------------------------------------------------

    def digests(self) -> Digests:
        """Digests of what all ranks have in common."""
        return self.state.digests() if self.shards is None else self.shards.shards.digests()

    def settle(self, cause: str) -> str:
        """The loop raised: complete the step if only the rest of the loop's body is missing."""
        if self._gradients:  # the others may complete the step with this rank's part of it
            self._capture_unsettled()
        if self.update.in_progress and not self.update.has_copy and not finish_step(self, cause):
            return "raised inside the update, so the state is between two steps"
        return ""

    def before_exit(self) -> None:
        """A loop manages its own files."""

    def advice(self) -> str:
        """Nothing is known beyond what the documents say."""
        return ""

    def finished(self, snapshot: Snapshot) -> None:
        """A step that was cut short is complete. The others may wait for this rank elsewhere, until it reports that."""
        self._snapshot, self.step = snapshot, snapshot.step
        if self.shards is not None:
            self.shards.keep(snapshot, compare=False)
