"""One fit under the protection of LastGasp: what is where in Lightning, told to the seam."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from lastgasp.adapter import (
    AdapterRun,
    Digests,
    Framework,
    GaspConfig,
    ManifestWriter,
    MarksConfig,
    StateSource,
    Training,
)
from lastgasp.adapter.checkpoint import name_of_fit
from lastgasp.adapter.torch import WORKERS, GaspSource, process_groups, save_verified
from lastgasp_lightning.boundary import before_calls, before_updates
from lastgasp_lightning.checkpoint_io import LAYOUT, VerifiedCheckpointIO
from lastgasp_lightning.compat import own_dict
from lastgasp_lightning.faults import kind_of
from lastgasp_lightning.loggers import LogRecord
from lastgasp_lightning.marks import LightningMarks
from lastgasp_lightning.patches import hold_observer, no_sigterm_broadcast
from lastgasp_lightning.ranks import connect, place_of, versions
from lastgasp_lightning.resume import Resume, logged
from lastgasp_lightning.selection import LightningSelector
from lastgasp_lightning.state import LightningState
from lastgasp_lightning.thisfit import ThisFit
from lastgasp_lightning.tuner import Tuning

log = logging.getLogger("lastgasp")


class LightningRun(Training):
    """What belongs to one `fit`; to the seam it is the training (`adapter.Training`).

    Attributes:
        life: connects, begins, ends.
    """

    def __init__(self, trainer: Any, config: GaspConfig, marks: MarksConfig) -> None:
        self._trainer, self._config = trainer, config
        users = signal.getsignal(signal.SIGTERM)
        self._users_handler = users if callable(users) else None
        self.fit = ThisFit(trainer, config.directory)
        self.state = LightningState(trainer, self.fit)
        self.resume = Resume(self.state)
        place = place_of(trainer)
        framework = Framework(
            name=f"lightning {versions()['lightning']}", kind_of=kind_of, device=trainer.local_rank, versions=versions()
        )
        self._writer = ManifestWriter("lightning", place, lambda: self.fit.fit)
        self.life = AdapterRun(framework, config, marks, place, connect(trainer, place))
        self.session = session = self.life.session
        self.progress, self.state.say, self.state.gate = session.progress, session.note, session.before_update
        self.tuning = Tuning(trainer, session.status, self.resume.pending)
        self.state.watch.aside = lambda: self.tuning.active
        self.logs = LogRecord(trainer, config.directory, self.fit.number)
        self.state.logged = self.logs.mark
        self.mark_update: Callable[[], None] = _nothing
        self.mark_step: Callable[[int], None] = _nothing
        self.selector = LightningSelector(trainer, config, place, session.gather, self.fit)
        self.selector.loaded = lambda: self.logs.go_on(session.gather)
        try:
            self._install()
        except BaseException as error:
            self.life.failed(error)
            raise

    def _install(self) -> None:
        trainer, session, on_close = self._trainer, self.session, self.life.on_close
        on_close(self.state.close, last=True)
        on_close(self.resume.uninstall)
        on_close(no_sigterm_broadcast(trainer))
        on_close(hold_observer(session))
        on_close(VerifiedCheckpointIO.install(trainer, self._config, self._writer, session.status).uninstall)
        on_close(self.selector.install())
        on_close(self.tuning.install())
        on_close(self.logs.uninstall)
        self.life.on_completed(lambda: self.fit.ended(durable=session.status.durable >= session.status.step))
        self.state.prepare()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Arrange the return to the boundary of `checkpoint`."""
        if self.resume.install(self._trainer, checkpoint) and self.selector.same_run:
            self.logs.hold(logged(checkpoint), checkpoint)

    def begin(self) -> None:
        """Training starts, or is resumed at the boundary that was restored."""
        step, strategy, life = self._trainer.global_step, self._trainer.strategy, self.life
        life.on_close(before_calls(strategy, "training_step", partial(self.progress, "forward")))
        life.on_close(before_calls(strategy.precision_plugin, "backward", self._backward))
        self._mark()
        for owner in (self._trainer, strategy, strategy.precision_plugin):  # patched above, and asked in each step
            own_dict(owner)
        self.logs.own()
        self._source = GaspSource(
            lambda files, step, aux: save_verified(self.state.dump(step, aux), files),
            lambda step: self._config.directory / f"gasp-{name_of_fit(self.fit.number())}step={step:08d}.ckpt", LAYOUT,
            recorder=self.state.recorder, writer=self._writer, config=self._config, alike=lambda: life.alike,
        )  # fmt: skip
        self._source.present = self.selector.present
        life.bind(self)
        durable = step if self.selector.resumed else 0
        life.begin(step, durable, users_handler=self._users_handler, device=str(strategy.root_device))
        if reason := self.state.position.inexact:
            workers = "a resume restores the order of the samples, not random numbers drawn in DataLoader workers"
            log.info(workers if reason == WORKERS else f"a resume in the middle of an epoch gets other data: {reason}")

    def follow_updates(self) -> bool:
        """Whether `before_update` is called from now on without the hook."""
        undo = before_updates(self._trainer.strategy.precision_plugin, self.before_update)
        if undo is not None:
            self.life.on_close(undo)
        return undo is not None

    def before_update(self) -> None:
        """Parameters are about to change."""
        self.state.before_update()
        self.mark_update()

    def _backward(self) -> None:
        """From here on this rank may wait for its peers, and they may make the step without it."""
        self.progress("backward")
        self.state.before_backward()

    def _mark(self) -> None:
        recorder = self.session.recorder
        if recorder is None:
            return
        marks = LightningMarks(self._trainer, recorder.marks)
        marks.install()
        self.life.on_close(marks.close)
        self.mark_update, self.mark_step = marks.update_begins, marks.step_end
        recorder.set_groups(process_groups())
        recorder.set_device_rows(marks.device_rows)

    # -- called by the seam -------------------------------------------------------------------------------

    @property
    def source(self) -> StateSource:
        """As `Training` says."""
        return self._source

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
            self.session.step_completed(snapshot.step)
        return ""

    def before_exit(self) -> None:
        """As `Training` says."""
        for logger in self._trainer.loggers:
            logger.finalize("failed")


def _nothing(*_: object) -> None:
    """Where nothing is marked."""
