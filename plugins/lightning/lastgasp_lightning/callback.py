"""`LastGasp`, the one object that a Lightning user adds. It translates Lightning's hooks into calls of the session."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lastgasp.adapter import (
    ConfigError,
    GaspConfig,
    HangTimeout,
    MarksConfig,
    asked_recovery,
    check_writable,
    refuse_unknown,
    tell_launcher,
)
from lastgasp.adapter.again import Recovery
from lastgasp.adapter.arenas import arena_of
from lastgasp.adapter.torch import common_directory
from lastgasp.adapter.worker import set_up_logs
from lastgasp_lightning.again import IN_PLACE, recovery_for, tell, watch_fits
from lastgasp_lightning.boundary import leave_out, reorder
from lastgasp_lightning.enters import Enters
from lastgasp_lightning.logversions import watch_versions
from lastgasp_lightning.ranks import require_same_lightning, require_supported
from lastgasp_lightning.run import LightningRun
from lastgasp_lightning.tuner import is_smoke_test, is_tuner_run

log = logging.getLogger("lastgasp")

_NOT_NEEDED = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward")
"""Hooks of each step that do nothing here; what happens in between is seen by patches for a tenth of the cost."""


class LastGasp(Enters, Callback):
    """Saves the current step when a rank dies, raises, hangs or is asked to stop; resumes from it.

    Args:
        dir: where checkpoints and incidents go, the same on all ranks; default `LASTGASP_DIR`.
        keep: how many of the checkpoints that LastGasp itself wrote to keep; default 3. Checkpoints of
            ModelCheckpoint are never removed.
        resume: "auto" (default) resumes from the newest checkpoint that verifies on all ranks; "never" ignores
            what was there before this job; a path starts from that one (a restart of the job continues from what
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
        recovery: how a fault may be answered: "auto" goes on in the same processes where that is possible
            (docs/in-place.md), "retry" without replacing any, "replace" only where one is replaced; "restart" saves the
            step and restarts the job, "save" saves it and ends the job. Default: "auto" for ddp,
            ModelParallelStrategy and FSDPStrategy on CPUs with gloo under a launcher, "restart" elsewhere.
        arena: with ModelParallelStrategy and FSDPStrategy: which steps are copied into memory that outlives the rank,
            "auto" (default), "every N" or "off" (docs/sharded.md).

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
        recovery: Recovery | None = None,
        arena: str | None = None,
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
        self.asked = asked_recovery(recovery)
        self._arena = arena_of(arena)
        watch_fits(self.asked)
        self._run: LightningRun | None = None

    # -- start ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, connect to the controller, select the checkpoint to resume from. All ranks do this together.

        Raises:
            ConfigError: an unsupported strategy, a Trainer of the other Lightning, or a directory that cannot be
                written.
            ControlError: this rank was refused by the controller (another version, other settings).
            NoGoodCheckpoint: there are checkpoints, and none can be trusted.
        """
        require_same_lightning(trainer)
        if stage != "fit" or is_tuner_run(trainer):
            return
        if is_smoke_test(trainer):
            if trainer.is_global_zero:
                set_up_logs()
                log.info("fast_dev_run: LastGasp does nothing in this fit, neither resumes it nor saves a step")
            return
        if sum(isinstance(callback, LastGasp) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigError("callbacks", "several LastGasp", "one LastGasp", "Leave one of them in the list.")
        require_supported(trainer)
        self.config = replace(self.config, directory=common_directory(self.config.directory))
        check_writable(self.config.directory)
        reorder(trainer, self)
        if not self.looked_at:
            self.recovery = recovery_for(trainer, self.asked)
            if self.recovery in IN_PLACE:
                why = "LastGasp was added to its trainer when the fit had begun (configure_callbacks)"
                tell(why, self.asked is not None)
        self._run = LightningRun(trainer, self.config, self.marks, self.recovery, self._arena)
        if self._run.entry is not None:
            self._run.entry.end = self._failed_first

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Arrange the return to the checkpoint's boundary."""
        if self._run is not None and not self._run.tuning.active:
            self._run.load(checkpoint)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make Lightning's own checkpoints resumable bit for bit, too."""
        if self._run is not None and not self._run.tuning.active:
            self._run.annotate(checkpoint)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hook the optimizers and the module."""
        if self._run is not None:
            self._run.set_up()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on a fault is answered."""
        run = self._run
        if run is not None:
            run.begin()
            told = ("on_before_optimizer_step",) if run.follow_updates() else ()
            run.life.on_close(leave_out(self, LastGasp, (*_NOT_NEEDED, *told)))

    # -- every step -------------------------------------------------------------------------------

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Parameters are about to change. Left out where the precision plugin reports it."""
        if self._run is not None:
            self._run.before_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is complete, if the batch ended one."""
        run = self._run
        if run is None:
            return
        step = run.state.boundary()
        if step is not None:
            run.complete(step)
        elif run.state.watch.uncounted:
            run.uncounted()
        run.progress("data")

    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        """Progress, for the hang watchdog."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.progress("validation")
            self._run.validating()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Back to training."""
        if self._run is not None and not trainer.sanity_checking:
            self._run.progress("data")

    # -- end --------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Have the step saved and wait for it. A rank that only saw its peers fail exits from here."""
        run, self._run = self._run, None
        if run is not None:
            run.life.failed(exception)

    def _failed_first(self, exception: BaseException) -> None:
        """Where the fit may be entered again, and before Lightning answers the exception."""
        run = self._run
        if run is not None and not isinstance(exception, _TunerExitException):
            run.raised = exception
            self.on_exception(run.trainer, run.trainer.lightning_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Training ended well: restore everything."""
        run, self._run = self._run, None
        if run is not None:
            run.life.close(completed=True)
