"""Faults inside a real Lightning loop: `FaultCallback` fires `lastgasp.testing.faults` at each phase.

It needs no change of the training script: `LASTGASP_FAULT` brings it in through the entry point
`lightning.pytorch.callbacks_factory` (see `lastgasp_lightning.entry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lastgasp.testing.archive import FaultyArchive
from lastgasp.testing.faults import FaultKit, install, kit_from_env

Closure = Callable[[], Any]
Step = Callable[..., Any]


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
        install(self._kit)
        self._hook_data(trainer)
        self._hook_model(pl_module)
        for optimizer in trainer.optimizers:
            _replace(self._undo, optimizer, "step", partial(self._step_of, optimizer))
        _replace(self._undo, trainer.strategy, "save_checkpoint", partial(self._save_of, trainer))

    def _fire(self, phase: str) -> None:
        self._kit.fire_at(phase, self._step)

    def _hook_data(self, trainer: Trainer) -> None:
        def before_fetch(original: Closure) -> Closure:
            def fetch() -> Any:
                self._kit.fire_at("data", trainer.global_step)
                return original()

            return fetch

        _replace(self._undo, trainer.fit_loop.epoch_loop, "_on_before_fetch", before_fetch)

    def _hook_model(self, module: LightningModule) -> None:
        inner = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
        handle = inner[len(inner) // 2].register_forward_hook(self._in_forward)
        self._undo.callback(handle.remove)
        trained = [p for p in module.parameters() if p.requires_grad]
        handle = trained[len(trained) // 2].register_hook(  # type: ignore[no-untyped-call]
            lambda grad: self._fire("backward")
        )
        self._undo.callback(handle.remove)

    def _in_forward(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        if module.training:
            self._fire("forward")

    def _step_of(self, optimizer: Optimizer, step: Step) -> Step:
        def faulty_step(closure: Closure | None = None, **options: Any) -> Any:
            if self._kit.due("update", self._step):
                result = self._half_step(optimizer, step, closure, options)
            else:
                result = step(closure, **options)
            self._fire("after_update")
            return result

        return faulty_step

    def _half_step(
        self,
        optimizer: Optimizer,
        step: Step,
        closure: Closure | None,
        options: Mapping[str, Any],
    ) -> Any:
        """The step, with the fault after the first half of its parameters.

        The first half is updated by the optimizer's bare function: its hooks tell others that the update is
        complete, and it is not.
        """
        bare = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        with ExitStack() as hidden:

            def closure_and_half() -> Any:
                loss = closure() if closure is not None else None
                first, second = _halves(optimizer)
                with _without_gradient(second):
                    bare(optimizer)
                self._fire("update")
                hidden.enter_context(_without_gradient(first))
                return loss

            return step(closure_and_half, **options)

    def _save_of(self, trainer: Trainer, save: Step) -> Step:
        def faulty_save(*args: Any, **options: Any) -> Any:
            if not self._kit.due("periodic_save", trainer.global_step):
                return save(*args, **options)
            fire = partial(self._kit.fire_at, "periodic_save", trainer.global_step)
            if not trainer.is_global_zero:
                fire()
            with _at_first_bytes(fire):
                return save(*args, **options)

        return faulty_save

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
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


def _replace(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Set `owner.name` to `wrap(owner.name)` on this object alone, and push the way back."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wrap(original))
    if own:
        undo.callback(setattr, owner, name, original)
    else:
        undo.callback(delattr, owner, name)


def _halves(optimizer: Optimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    moving = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    middle = (len(moving) + 1) // 2
    return moving[:middle], moving[middle:]


@contextmanager
def _without_gradient(params: list[torch.Tensor]) -> Iterator[None]:
    """Optimizers leave a parameter without a gradient alone."""
    gradients = [p.grad for p in params]
    for p in params:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient


@contextmanager
def _at_first_bytes(fire: Callable[[], None]) -> Iterator[None]:
    """Call `fire` once the pickle and the first tensor of a `torch.save` have been written."""

    def faulty(save: Step) -> Step:
        def save_to(obj: object, archive: object, *more: Any, **options: Any) -> Any:
            return save(obj, FaultyArchive(archive, fire), *more, **options)

        return save_to

    with ExitStack() as undo:
        _replace(undo, torch.serialization, "_save", faulty)
        yield
