"""Faults inside a real Lightning loop: `FaultCallback` fires `lastgasp.testing.faults` at each phase.

It needs no change of the training script: `LASTGASP_FAULT` brings it in through the entry point
`lightning.pytorch.callbacks_factory` (see `lastgasp_lightning.entry`).
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lastgasp.adapter.testing import FaultKit, install, kit_from_env
from lastgasp.adapter.torch import Closure, Step, at_first_bytes, hook_model, hook_optimizer, replace


def fault_callbacks() -> list[Callback]:
    """One `FaultCallback` where `LASTGASP_FAULT` asks for faults, else nothing.

    Raises:
        ConfigError: `LASTGASP_FAULT` is malformed.
    """
    kit = kit_from_env()
    return [] if kit is None else [FaultCallback(kit)]


class FaultCallback(Callback):
    """Fires the kit's faults inside the phases that they name.

    data: the loop has asked for the next batch. forward, backward: in a hook of the module or parameter in
    the middle of the model. update: half of the parameters with a gradient have changed, the others have
    not; what does not end the process sees the other half change afterwards. after_update: the optimizer
    has returned. step_end: in `on_train_batch_end`. periodic_save: on rank 0 within `torch.save`, when the
    first bytes are written; on other ranks while rank 0 writes. validation: before a batch of it.
    Everything that it patches it restores at teardown or after an exception.

    Args:
        kit: the faults; its rank is set from the trainer.
    """

    def __init__(self, kit: FaultKit) -> None:
        self._kit, self._undo = kit, ExitStack()
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install all hooks; the optimizers exist and Lightning has not asked for a batch yet."""
        self._kit.rank, self._step = trainer.global_rank, trainer.global_step
        self._kit.entered()
        install(self._kit)
        self._hook_data(trainer)
        graph = (pl_module, "training_step") if pl_module._compiler_ctx else None  # torch.compile(module)
        hook_model(self._undo, pl_module, self._fire, graph)
        for optimizer in trainer.optimizers:
            hook_optimizer(self._undo, optimizer, self._kit, lambda: self._step)
        replace(self._undo, trainer.strategy, "save_checkpoint", partial(self._save_of, trainer))

    def _fire(self, phase: str) -> None:
        self._kit.fire_at(phase, self._step)

    def _hook_data(self, trainer: Trainer) -> None:
        def before_fetch(original: Closure) -> Closure:
            def fetch() -> Any:
                self._kit.fire_at("data", trainer.global_step)
                return original()

            return fetch

        replace(self._undo, trainer.fit_loop.epoch_loop, "_on_before_fetch", before_fetch)

    def _save_of(self, trainer: Trainer, save: Step) -> Step:
        def faulty_save(*args: Any, **options: Any) -> Any:
            if not self._kit.due("periodic_save", trainer.global_step):
                return save(*args, **options)
            fire = partial(self._kit.fire_at, "periodic_save", trainer.global_step)
            if not trainer.is_global_zero:
                fire()
            with at_first_bytes(fire):
                return save(*args, **options)

        return faulty_save

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the step under way; Lightning's counter moves before the step has ended."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Fire the faults of phase step_end; a batch that only accumulates ends no step."""
        if trainer.global_step > self._step:
            self._fire("step_end")

    def on_validation_batch_start(self, trainer: Trainer, *args: object, **options: object) -> None:
        """Fire the faults of phase validation, not in the sanity check."""
        if not trainer.sanity_checking:
            self._kit.fire_at("validation", trainer.global_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore all but the kit, whose gasp is yet to come; Lightning calls no teardown after this."""
        self._undo.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore everything and take the kit away."""
        self._undo.close()
        install(None)
