"""The faults of `LASTGASP_FAULT` in a custom loop; for tests and drills."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from lastgasp.pytorch.faulty import Step, at_first_bytes, hook_model, hook_optimizer, replace
from lastgasp.pytorch.zero import inside
from lastgasp.testing.faults import FaultKit, install, kit_from_env


def install_faults(run: Any) -> Callable[[], None]:
    """Install them; return a function that removes them. Does nothing if none are requested.

    data: the loop has asked for the next batch. forward, backward, before_update, update, after_update: see
    `pytorch.faulty`.
    step_end: the loop's body has ended, the step is not captured yet. periodic_save: within `torch.save` on rank
    0, while rank 0 writes on others. validation: the model's forward pass, not in training.

    Args:
        run: the `loop.run.Run`.

    Raises:
        ConfigError: `LASTGASP_FAULT` is malformed.
    """
    kit = kit_from_env()
    if kit is None:
        return lambda: None
    kit.rank = run.rank
    install(kit)
    undo = ExitStack()
    undo.callback(install, None)
    for model, module in zip(run.state.models.values(), run.state.modules.values(), strict=True):
        if any(p.requires_grad for p in module.parameters()):
            hook_model(undo, model, lambda phase: kit.fire_at(phase, run.step))
            undo.callback(module.register_forward_pre_hook(partial(_validation, kit, run)).remove)
    for optimizer in run.state.optimizers.values():
        hook_optimizer(undo, inside(getattr(optimizer, "inner", optimizer)), kit, lambda: int(run.step))
    replace(undo, run, "save", partial(_faulty_save, kit, run))
    return undo.close


def _validation(kit: FaultKit, run: Any, module: Any, *_: object) -> None:
    if not module.training and not torch.compiler.is_compiling():
        kit.fire_at("validation", run.step)


def _faulty_save(kit: FaultKit, run: Any, save: Step) -> Step:
    def faulty() -> Any:
        if run.rank != 0 or not kit.due("periodic_save", run.step):
            return save()
        with at_first_bytes(lambda: kit.fire_at("periodic_save", run.step)):
            return save()

    return faulty
