"""One fit under the protection of LastGasp: what is where in Lightning, told to the seam."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lastgasp.adapter import (
    AdapterRun,
    Digests,
    Framework,
    GaspConfig,
    ManifestWriter,
    MarksConfig,
    NotSaveable,
    StateSource,
    Training,
)
from lastgasp.adapter.again import Fewer, Recovery, users_handler
from lastgasp.adapter.arenas import ArenaMode
from lastgasp.adapter.checkpoint import Staged
from lastgasp.adapter.torch import (
    EXCHANGED,
    WORKERS,
    AuxRecorder,
    GaspSource,
    HeldGradients,
    ReplicaWatch,
    Unsaved,
    UnsavedData,
    UnsavedOptimizers,
    process_groups,
    save_verified,
    which_weights,
)
from lastgasp_lightning.again import (
    IN_PLACE,
    LightningAgain,
    entry_of,
    gasp_path,
    keep_sigterm,
    tell,
    tell_others,
)
from lastgasp_lightning.boundary import before_calls, before_updates, never_saved
from lastgasp_lightning.buffers import Exchange
from lastgasp_lightning.carried import VALUES, CarriedValues, split
from lastgasp_lightning.checkpoint_io import LAYOUT, VerifiedCheckpointIO
from lastgasp_lightning.compat import own_dict
from lastgasp_lightning.enters import Enters
from lastgasp_lightning.faults import kind_of
from lastgasp_lightning.kept import KeptTrainer
from lastgasp_lightning.loggers import LogRecord
from lastgasp_lightning.manual import StepCopies
from lastgasp_lightning.marks import LightningMarks
from lastgasp_lightning.patches import hold_observer, no_sigterm_broadcast
from lastgasp_lightning.ranks import connect, is_sharded_by, place_of, require_supported_optimizers, versions
from lastgasp_lightning.resume import Resume, logged
from lastgasp_lightning.selection import LightningSelector
from lastgasp_lightning.state import KEY, LightningState
from lastgasp_lightning.thisfit import ThisFit
from lastgasp_lightning.tuner import Tuning
from lastgasp_lightning.uservalues import unsaved_of, unsaved_study

if TYPE_CHECKING:
    from lastgasp_lightning.sharded import LightningShards

log = logging.getLogger("lastgasp")


class LightningRun(Training):
    """What belongs to one `fit`; to the seam it is the training (`adapter.Training`).

    Attributes:
        life: connects, begins, ends.
        entry: of this fit, where it may be entered again.
        elastic: what is done for an `ElasticLoader`, if it has one.
        raised: what ended it, where Lightning has not told the other callbacks of it yet.
    """

    def __init__(
        self, trainer: Any, config: GaspConfig, marks: MarksConfig, recovery: Recovery, arena: ArenaMode = "auto"
    ) -> None:
        self.trainer, self.config, self.recovery = trainer, config, recovery
        self.entry = entry_of(trainer)
        self.raised: BaseException | None = None
        held = self.entry.take() if self.entry is not None else None
        self.users_handler = users_handler(held)
        self.fit = fit = ThisFit(trainer, config.directory, held is not None)
        self.state = LightningState(trainer, self.fit)
        self.elastic = self.state.position.elastic
        self.resume, self.carried = Resume(self.state), CarriedValues(self)
        self.place = place = place_of(trainer)
        framework = Framework(
            name=f"lightning {versions()['lightning']}", kind_of=kind_of, device=trainer.local_rank, versions=versions()
        )
        self.writer = ManifestWriter("lightning", place, lambda: fit.fit, home=config.directory)
        make = partial(AdapterRun, framework, config, marks)
        joined = held.life if held is not None else None
        self.life = joined or make(place, connect(trainer, place))
        if held is not None and joined is None:  # ranks are given what others hold only where all are alike
            self.life.alike_before = True
        self.session = session = self.life.session
        self.progress, self.state.say = session.progress, session.note
        leads = session.backend.backend == "embedded"  # another engine counts updates itself
        self.state.exchange = Exchange(session.before_update, session.status if leads else None)
        fit.note = session.note
        fit.tell_of_others()
        self.tuning = Tuning(trainer, session.status, self.resume.pending)
        self.state.watch.aside = lambda: self.tuning.active
        self.logs = LogRecord(trainer, config.directory, self.fit.number)
        self.state.logged = self.logs.mark
        self.mark_update: Callable[[], None] = _nothing
        self.mark_step: Callable[[int], None] = _nothing
        self.unsaved: Unsaved | None = None
        self._data, self._optimizers, self._gradients = UnsavedData(), UnsavedOptimizers([]), HeldGradients([], [])
        self.selector = LightningSelector(trainer, config, place, session.gather, self.fit)
        self.selector.note = session.note
        self.resume.goes_on, self.resume.job = self._goes_on, place.job
        self.resume.gather = lambda tag, own: session.gather(f"{tag}/{self.fit.number()}", own)
        self.selector.loaded = lambda: self.logs.go_on(session.gather)
        self._again_here = self._again(arena)(self, make, self.writer, held)
        if recovery == "save":
            session.status.recovery = recovery
        if self._again_here.enters:
            self._again_here.restores(self.selector)
            self.resume.put_back = self._again_here.put_back
            self.resume.in_place = True
        else:
            self.resume.bring = self.carried.restore
        if joined is not None:
            self.life.on_close(keep_sigterm(trainer))
        try:
            self.shards = _shards(self, arena)
            if self.shards is None:
                self.selector.begins = self.carried.begins
            self._install()
        except BaseException as error:
            self.life.failed(error)
            raise

    def _again(self, arena: ArenaMode) -> type[LightningAgain]:
        """How this fit is entered again; `recovery` says so afterwards where it cannot be."""
        if not is_sharded_by(self.trainer.strategy):
            return LightningAgain
        from lastgasp_lightning.parts_again import LightningPartsAgain

        if self.recovery in IN_PLACE and (arena == 0 or self.place.world_size == 1):
            if self.entry is not None:
                asked = any(one.asked for one in self.trainer.callbacks if isinstance(one, Enters))
                tell("there is no recovery in place without arenas, where a rank's part goes with it", asked)
            self.recovery = "restart"
        return LightningPartsAgain

    def _install(self) -> None:
        trainer, session, on_close = self.trainer, self.session, self.life.on_close
        state = self.state
        if session.backend.backend == "embedded" and self.shards is None:
            state.copies = StepCopies(session.status, lambda: state.gate(), lambda: state.recorder.queued.mark())
        on_close(state.close, last=True)
        on_close(self.resume.uninstall)
        on_close(no_sigterm_broadcast(trainer))
        on_close(hold_observer(session))
        io = VerifiedCheckpointIO.install(trainer, self.config, self.writer, session.status)
        on_close(io.uninstall)
        self.selector.io = io if io.installed and self.shards is None else None
        if self.shards is not None:
            from lastgasp_lightning.sharded_io import ShardedCheckpoints

            self.state.shards, self.state.completed = self.shards, self.complete
            self.selector.left = self.shards.begin_with
            on_close(ShardedCheckpoints(self, io).install())
        on_close(self.selector.install())
        on_close(self.tuning.install())
        on_close(self.logs.uninstall)
        self.life.on_completed(lambda: self.fit.ended(durable=session.status.durable >= session.status.step))
        self.life.on_completed(self._ended)
        self.state.prepare()

    def _goes_on(self) -> bool:
        """As `Resume.goes_on`: what rank 0 finds."""
        own = self.selector.goes_on
        if self.resume.in_place:
            return own
        return self.session.gather(f"goes on/{self.fit.number()}", b"1" if own else b"")[0] == b"1"

    def _ended(self) -> None:
        if self.resume.ends and self.trainer.is_global_zero:
            self.selector.ended()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Arrange the return to the boundary of `checkpoint`."""
        if not self.resume.install(self.trainer, checkpoint):
            return
        if self.selector.same_run:
            self.logs.hold(logged(checkpoint), checkpoint)
        else:
            self.resume.reached = partial(self.logs.hush, logged(checkpoint))

    def set_up(self) -> None:
        """`on_fit_start`: hook the optimizers and the module, where their state is restored already."""
        require_supported_optimizers(self.trainer)
        self._again_here.begun()
        if self.shards is None:
            self._hook()
        else:
            self.fit.look_at_optimizers()

    def _hook(self) -> None:
        self.state.install()
        self.state.gate = self.state.recorder.queued.gate(self.session)
        self.logs.install()

    def begin(self) -> None:
        """Training starts, or is resumed at the boundary that was restored."""
        if self.shards is not None:
            self._hook()
        step, strategy, life = self.trainer.global_step, self.trainer.strategy, self.life
        life.on_close(before_calls(strategy, "training_step", partial(self.progress, "forward")))
        life.on_close(before_calls(strategy.precision_plugin, "backward", self._backward))
        life.on_close(before_calls(self.trainer.fit_loop, "on_run_end", life.finish))
        self._mark()
        for owner in (self.trainer, strategy, strategy.precision_plugin):  # patched above, and asked in each step
            own_dict(owner)
        self.logs.own()
        if self.shards is not None:
            self.shards.begin()
        source = self.shards or GaspSource(
            self._write,
            lambda step: gasp_path(self.config.directory, step, self.fit.number()), LAYOUT,
            recorder=self.state.recorder, writer=self.writer, config=self.config, alike=lambda: life.alike,
        )  # fmt: skip
        if isinstance(source, GaspSource):
            source.carried = self.carried.written
        life.on_close(before_calls(self.trainer.fit_loop, "on_advance_start", self.carried.starts))
        source.present, self.unsaved = self.selector.present, unsaved_of(self.trainer)
        if self.entry is not None and isinstance(kept := self.entry.objects, KeptTrainer):
            kept.begun = self.unsaved.since(kept.begun)
        self._optimizers = UnsavedOptimizers(self.trainer.optimizers, sharded=self.shards is not None)
        self._gradients = HeldGradients(self.trainer.lightning_module.named_parameters(), self.trainer.optimizers)
        life.on_close(self._gradients.remove)
        self._source: StateSource = source
        durable = self._again_here.durable(step) if self.selector.resumed else 0
        if self._again_here.enters:
            self._again_here.ready()
        self.mark_step = partial(self._first_step, self.mark_step)
        optimizers = self.trainer.optimizers if self.shards is None else ()
        self._replicas = ReplicaWatch([strategy.model], optimizers, life.compare_again, self.session.note)
        life.on_close(self._replicas.remove)
        life.bind(self)
        self.elastic.mark(step)
        self.session.status.fewer = Fewer(self._again_here.elastic())
        self.elastic.found_rigid = self.session.status.found_rigid
        self._again_here.agree_on_fewer()
        life.begin(step, durable, users_handler=self.users_handler, device=str(strategy.root_device))
        copied = self.state.copies.copying
        if self.place.world_size == 1 and (code := never_saved(self.trainer.lightning_module, copied)):
            log.info("an exception in %s cannot be answered with a save: without another rank, all steps since the "
                     "newest checkpoint are lost then", code)  # fmt: skip
        if reason := self.state.position.inexact:
            workers = "a resume restores the order of the samples, not random numbers drawn in DataLoader workers"
            log.info(workers if reason == WORKERS else f"a resume in the middle of an epoch gets other data: {reason}")

    def follow_updates(self) -> bool:
        """Whether `before_update` is called from now on without the hook."""
        undo = before_updates(self.trainer.strategy.precision_plugin, self.before_update)
        if undo is not None:
            self.life.on_close(undo)
        return undo is not None

    def before_update(self) -> None:
        """Parameters are about to change."""
        self.state.before_update()
        self.mark_update()

    def complete(self, step: int) -> None:
        """A step is complete and captured."""
        try:
            self.session.step_completed(step)
        except RuntimeError:  # the step is complete, and all leave the training behind it
            self._mark_end(step)
            raise
        self._mark_end(step)
        snapshot = self.state.snapshot
        if snapshot is not None:
            self._replicas.step_over(snapshot.flags[0])

    def _mark_end(self, step: int) -> None:
        self.elastic.mark(step)
        self._gradients.step_over()
        self.mark_step(step)

    def validating(self) -> None:
        """A batch of a validation begins; by then it has the weights that it is to have."""
        if not self.state.exchange.done:
            self.state.moving.in_aside()

    def uncounted(self) -> None:
        """Manual optimization has changed parameters, and Lightning has counted no step."""
        names = ", ".join(type(one).__name__ for one in self.trainer.optimizers)
        self.session.note(
            f"a batch has changed parameters without optimizer.step() ({names}): Lightning counts no step, so none can "
            "be saved. Have the module call step() of what self.optimizers() returns"
        )

    def _backward(self) -> None:
        """From here on this rank may wait for its peers, and they may make the step without it."""
        self.progress("backward")
        self._gradients.backward_begins()
        self.state.before_backward()

    def _mark(self) -> None:
        recorder = self.session.recorder
        if recorder is None:
            return
        marks = LightningMarks(self.trainer, recorder.marks)
        marks.install()
        self.life.on_close(marks.close)
        self.mark_update, self.mark_step = marks.update_begins, marks.step_end
        recorder.set_groups(process_groups())
        recorder.set_device_rows(marks.device_rows)

    def _first_step(self, mark_step: Callable[[int], None], step: int) -> None:
        """The first step since `fit` began, also again: what was held then is not needed any more."""
        self.mark_step = mark_step
        mark_step(step)
        self._data.look_at(self.state.position.loaders)
        self._again_here.forget()

    # -- called by the seam -------------------------------------------------------------------------------

    @property
    def recorder(self) -> AuxRecorder:
        """Of this rank's auxiliary state."""
        return self.state.recorder

    @property
    def source(self) -> StateSource:
        """As `Training` says."""
        return self._source

    @source.setter
    def source(self, source: StateSource) -> None:
        self._source = source

    def dump(self, step: int, aux: Mapping[int, bytes]) -> dict[str, Any]:
        """The checkpoint of `step`; enters no collective."""
        return self._with_samples(self.state.dump(step, aux), step)

    def _with_samples(self, checkpoint: dict[str, Any], step: int) -> dict[str, Any]:
        if (used := self.elastic.used_by(step)) is not None:
            checkpoint[KEY]["elastic"] = used
        return checkpoint

    def _write(self, files: Staged, step: int, aux: Mapping[int, bytes]) -> None:
        optimizers = self.trainer.optimizers
        before = which_weights(one.param_groups for one in optimizers)
        save_verified(self._dump_for_a_file(step, aux), files)
        if which_weights(one.param_groups for one in optimizers) != before:
            raise NotSaveable(EXCHANGED)

    def _dump_for_a_file(self, step: int, aux: Mapping[int, bytes]) -> dict[str, Any]:
        aux, values = split(aux)
        names = self.carried.names(values)
        checkpoint = self.dump(step, aux)
        checkpoint[KEY][VALUES] = values
        if self.entry is None:
            self.note_unsaved(names)
        else:  # training may go on in place, with what a file does not hold: who begins with the file says so
            self.note_lost()
            checkpoint[KEY]["not_saved"] = self.not_saved(names)
        return checkpoint

    def not_saved(self, carried: frozenset[str] = frozenset()) -> str:
        """As `Unsaved.note`."""
        found = self.unsaved.note(carried) if self.unsaved is not None else "", unsaved_study(self.trainer)
        return "; ".join(filter(None, found))

    def note_unsaved(self, carried: frozenset[str] = frozenset()) -> None:
        """A gasp is written, with which a new process is to begin: note what it does not have."""
        if note := self.not_saved(carried):
            self.session.note(note)
        self.note_lost()

    def note_lost(self) -> None:
        """Note what is lost also where the fit is entered again, whose data are what they are by then."""
        for note in self._lost():
            self.session.note(note)

    def _lost(self) -> list[str]:
        return [note for note in (self._data.note(), self._optimizers.note(), self._gradients.note()) if note]

    def annotate(self, checkpoint: dict[str, Any]) -> None:
        """As `LightningState.annotate`; who resumes is told what the checkpoint does not have."""
        self.state.annotate(checkpoint)
        if KEY in checkpoint:
            checkpoint[KEY]["not_saved"] = "; ".join(filter(None, (self.not_saved(), *self._lost())))
            self._with_samples(checkpoint, checkpoint[KEY]["step"])

    def digests(self) -> Digests:
        """As `Training` says."""
        return self.state.digests()

    def settle(self, cause: str) -> str:
        """As `Training` says."""
        status = self.session.status
        if not self.state.finish_step():
            return "raised inside the update, so the state is between two steps" if status.inside else ""
        snapshot = self.state.snapshot
        if snapshot is not None and snapshot.step > status.step:
            status.cut_short = snapshot.step
            self.session.step_completed(snapshot.step)
        return ""

    def before_exit(self) -> None:
        """As `Training` says."""
        for logger in self.trainer.loggers:
            logger.finalize("failed")
        if self.raised is not None:
            tell_others(self.trainer, self.raised)


def _shards(run: LightningRun, arena: ArenaMode) -> LightningShards | None:
    """What a run has to do about shards; None if its ranks hold all of the model. Imports what that takes only then.

    Raises:
        ConfigError: it cannot be protected here.
    """
    if not is_sharded_by(run.trainer.strategy):
        return None
    from lastgasp_lightning.sharded import LightningShards

    return LightningShards(run, run.writer, arena)


def _nothing(*_: object) -> None:
    """Where nothing is marked."""
