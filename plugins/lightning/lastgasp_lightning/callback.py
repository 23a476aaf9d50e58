"""`LastGasp`, the one object that a Lightning user adds. It translates Lightning's hooks into Session calls."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lastgasp.config import GaspConfig, HangTimeout, check_writable, refuse_unknown
from lastgasp.errors import ConfigError
from lastgasp.exception_origin import is_success
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import Released
from lastgasp.pytorch.exception_origin import cause_of
from lastgasp.pytorch.position import WORKERS
from lastgasp.pytorch.processgroups import process_groups
from lastgasp.session import Session, leave
from lastgasp.startup_refusal import tell_launcher
from lastgasp.steps.attach import Marking
from lastgasp.steps.settings import MarksConfig
from lastgasp.undoing import run_all
from lastgasp_lightning.boundary import before_calls, before_updates, leave_out, reorder
from lastgasp_lightning.checkpoint_io import VerifiedCheckpointIO
from lastgasp_lightning.compat import Undo
from lastgasp_lightning.faults import kind_of
from lastgasp_lightning.loggers import LogRecord
from lastgasp_lightning.logversions import watch_versions
from lastgasp_lightning.marks import LightningMarks
from lastgasp_lightning.patches import hold_observer, no_sigterm_broadcast
from lastgasp_lightning.ranks import connect, place_of, require_supported, versions
from lastgasp_lightning.resume import Resume, logged
from lastgasp_lightning.selection import LightningSelector
from lastgasp_lightning.source import LightningSource
from lastgasp_lightning.state import LightningState
from lastgasp_lightning.thisfit import ThisFit
from lastgasp_lightning.tuner import Tuning, is_tuner_run

log = logging.getLogger("lastgasp")


_NOT_NEEDED = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
"""Hooks of each step that do nothing here; what must be known in between, patches tell for a tenth of the cost."""


class LastGasp(Callback):
    """Saves the step that training stands on when a rank dies, raises, hangs or is asked to stop; resumes from it.

    Args:
        dir: where checkpoints and incidents go, the same on all ranks; default `LASTGASP_DIR`.
        keep: how many of the checkpoints that LastGasp itself wrote to keep; default 3. Checkpoints of
            ModelCheckpoint are never removed.
        resume: "auto" (default) goes on from the newest checkpoint that verifies on all ranks; "never" ignores
            what was there before this job; a path starts from that one (a restart of the job goes on from what
            it has saved since).
        hang_timeout: seconds without any progress after which ranks count as hung; "auto" (default) learns it
            from the run, 60 s at least.
        save_timeout: seconds that a save after a fault may take before another rank is tried; default 600.
        finish_timeout: seconds that a rank inside its optimizer update gets to finish it; default 10.
        sha256: also write SHA-256 digests into the manifests; default False.
        marks: what is marked in each step, for `lastgasp report`: True (default) for all but the collectives, False
            for nothing, or names out of step, forward, dataloader, save, comm ("all", "none"). All but False can be
            switched while the job runs (`lastgasp switch`).
        profiling_dir: where the marks' files go; default MindCluster's directory where there is one, else
            `profiling` beside the checkpoints.
        profiling_limit_mb: MB that the marks' files may take; beyond it the oldest go; default 5000.

    Each has an environment variable (`LASTGASP_KEEP`, ...), which counts where the argument is left out.

    Raises:
        ConfigError: a value that is not allowed; names field, value, what is allowed, and what to do.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        keep: int | None = None,
        resume: str | os.PathLike[str] | None = None,
        hang_timeout: HangTimeout | None = None,
        save_timeout: float | None = None,
        finish_timeout: float | None = None,
        sha256: bool | None = None,
        marks: bool | str | None = None,
        profiling_dir: str | os.PathLike[str] | None = None,
        profiling_limit_mb: int | None = None,
        **unknown: Any,
    ) -> None:
        tell_launcher()
        watch_versions()
        refuse_unknown(unknown, LastGasp.__init__)
        self.config = GaspConfig.resolve(
            dir,
            keep=keep,
            resume=resume,
            hang_timeout=hang_timeout,
            save_timeout=save_timeout,
            finish_timeout=finish_timeout,
            sha256=sha256,
        )
        self.marks = MarksConfig.resolve(marks, profiling_dir, profiling_limit_mb)
        self._run: _Run | None = None

    # -- start ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, connect to the controller, choose what to resume from. All ranks do this together.

        Raises:
            ConfigError: an unsupported strategy, or a directory that cannot be written.
            ControlError: this rank was refused by the controller (another version, other settings).
            NoGoodCheckpoint: there are checkpoints, and none can be trusted.
        """
        if stage != "fit" or is_tuner_run(trainer):
            return
        if sum(isinstance(callback, LastGasp) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigError("callbacks", "several LastGasp", "one LastGasp", "Leave one of them in the list.")
        require_supported(trainer)
        check_writable(self.config.directory)
        reorder(trainer, self)
        self._run = _Run(trainer, self.config, self.marks)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Arrange the return to the boundary that the checkpoint stands on."""
        if self._run is not None and not self._run.tuning.active:
            self._run.load(checkpoint)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make Lightning's own checkpoints resumable bit for bit, too."""
        if self._run is not None and not self._run.tuning.active:
            self._run.state.annotate(checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hook the optimizers and the module."""
        if self._run is not None:
            self._run.state.install()
            self._run.logs.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on a fault is answered."""
        run = self._run
        if run is not None:
            run.begin()
            told = ("on_before_optimizer_step",) if run.follow_updates() else ()
            run.skip(leave_out(self, LastGasp, (*_NOT_NEEDED, *told)))

    # -- every step -------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Parameters are about to change. Left out where the precision plugin tells it."""
        self._run.before_update()  # type: ignore[union-attr]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is complete, if the batch ended one."""
        run = self._run
        step = run.state.boundary()  # type: ignore[union-attr]
        if step is not None:
            run.session.step_completed(step)  # type: ignore[union-attr]
            run.mark_step(step)  # type: ignore[union-attr]
        run.progress("data")  # type: ignore[union-attr]

    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        """Progress, for the hang watchdog."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.progress("validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to training."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.progress("data")

    # -- end --------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Have the step saved and wait for it. A rank that only saw its peers fail leaves from here."""
        run, self._run = self._run, None
        if run is not None:
            run.end_with(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Training ended well: put everything back as it was."""
        run, self._run = self._run, None
        if run is not None:
            run.close(goodbye=True)


class _Run:
    """What belongs to one `fit`."""

    def __init__(self, trainer: Any, config: GaspConfig, marks: MarksConfig) -> None:
        self._trainer, self._begun = trainer, False
        self._users_handler = signal.getsignal(signal.SIGTERM)
        self.fit = ThisFit(trainer, config.directory)
        self.state = LightningState(trainer, self.fit, before_update=self._before_update)
        self.resume = Resume(self.state)
        self.source = LightningSource(self.state, config, place_of(trainer))
        place = self.source.place
        marking = Marking(config=marks, framework=f"lightning {versions()['lightning']}", device=trainer.local_rank)
        self.session = Session(config, place, self.source, connect(trainer, place), marking)
        self.progress, self.state.say = self.session.progress, self.session.note
        self.tuning = Tuning(trainer, self.session.status, self.resume.pending)
        self.state.watch.aside = lambda: self.tuning.active
        self.logs = LogRecord(trainer, config.directory, self.fit.number)
        self.state.logged = self.logs.mark
        self.mark_update: Callable[[], None] = _nothing
        self.mark_step: Callable[[int], None] = _nothing
        self._undo = [no_sigterm_broadcast(trainer), hold_observer(self.session)]
        try:
            self.io = VerifiedCheckpointIO.install(trainer, config, self.source.writer, self.session.status)
            self.selector = LightningSelector(trainer, config, self.source.place, self.session.gather, self.fit)
            self.selector.loaded = lambda: self.logs.go_on(self.session.gather)
            self._undo += [self.io.uninstall, self.selector.install(), self.tuning.install(), self.logs.uninstall]
            self.state.prepare()
        except BaseException:
            self.close(goodbye=False)
            raise

    def _before_update(self) -> None:
        self.session.before_update()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Arrange the return to the boundary of `checkpoint`."""
        if self.resume.install(self._trainer, checkpoint) and self.selector.same_run:
            self.logs.hold(logged(checkpoint), checkpoint)

    def begin(self) -> None:
        """Training starts, or is resumed at the boundary that was restored."""
        step = self._trainer.global_step
        known = callable(self._users_handler)
        strategy = self._trainer.strategy
        self._undo.append(before_calls(strategy, "training_step", partial(self.progress, "forward")))
        self._undo.append(before_calls(strategy.precision_plugin, "backward", self._backward))
        self._mark()
        self.logs.own()
        self.session.register(str(self._trainer.strategy.root_device), versions())
        self.source.stood = self.selector.stood
        self.source.alike = self.session.compare_replicas(self.state.digests)
        self.session.training_started(step, durable=step if self.selector.resumed else 0)
        self.session.take_sigterm(self._users_handler if known else None)
        self._begun = True
        if reason := self.state.position.inexact:
            workers = "a resume restores the order of the samples, not random numbers drawn in DataLoader workers"
            log.info(workers if reason == WORKERS else f"a resume in the middle of an epoch gets other data: {reason}")

    def follow_updates(self) -> bool:
        """Whether `before_update` is called from now on without the hook."""
        undo = before_updates(self._trainer.strategy.precision_plugin, self.before_update)
        self._undo += [undo] if undo is not None else []
        return undo is not None

    def before_update(self) -> None:
        """Parameters are about to change."""
        self.state.before_update()
        self.mark_update()

    def _backward(self) -> None:
        """From here on this rank may wait for its peers, and they may make the step without it."""
        self.progress("backward")
        self.state.before_backward()

    def skip(self, undo: Undo) -> None:
        """Hooks are left out until the end."""
        self._undo.append(undo)

    def _mark(self) -> None:
        recorder = self.session.recorder
        if recorder is None:
            return
        marks = LightningMarks(self._trainer, recorder.marks, self.source)
        marks.install()
        self._undo.append(marks.close)
        self.mark_update, self.mark_step = marks.update_begins, marks.step_end
        recorder.set_groups(process_groups())
        recorder.set_device_rows(marks.device_rows)

    def end_with(self, exception: BaseException) -> None:
        """The training thread raised."""
        if isinstance(exception, Released):
            self._leave(exception.outcome)
        if is_success(exception):
            self.close(goodbye=True)
            return
        kind = kind_of(exception)
        outcome = self._recover(exception)
        if kind == "peer" and outcome is not None and self.source.place.world_size > 1:
            self._leave(outcome, cause_of(exception))
        self.close(goodbye=False)

    def _recover(self, exception: BaseException) -> Release | None:
        if not self._begun:
            self.session.failed_to_start(exception, kind_of(exception))
            return None  # nothing was trained
        status, state = self.session.status, self.state
        if not state.finish_step():
            status.broken = f"{cause_of(exception)}: raised inside the update, so the state is between two steps"
        elif state.snapshot is not None and state.snapshot.step > status.step:
            self.session.step_completed(state.snapshot.step)
        if not status.inside:
            status.broken = ""
        return self.session.fault(kind_of(exception), cause_of(exception))

    def _leave(self, outcome: Release, because: str = "") -> None:
        for logger in self._trainer.loggers:
            logger.finalize("failed")
        leave(outcome, because)

    def close(self, goodbye: bool) -> None:
        """Undo everything."""
        undone, self._undo = self._undo[::-1], []
        durable = self.session.status.durable >= self.session.status.step
        fit = [lambda: self.fit.ended(durable=durable)] if goodbye else []
        run_all([*fit, *undone, self.resume.uninstall, lambda: self.session.close(goodbye), self.state.close])


def _nothing(*_: object) -> None:
    """Where nothing is marked."""
