"""A fit over an `ElasticLoader`: one batch of Lightning's is one step of all ranks, whoever does its micro-batches.

So all that Lightning counts (`global_step`, batches, schedules, validations) does not depend on how many ranks there
are. Within a batch each rank goes through its own micro-batches: `training_step` and a backward pass for each. DDP's
wrapper is left, since ranks may have unequal numbers of backward passes; the loader sums the gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn import SyncBatchNorm
from torchmetrics import Metric

from lastgasp.adapter import ConfigError, UsageError
from lastgasp.adapter.torch import ElasticLoader, GlobalBatch, as_rank
from lastgasp_lightning.buffers import are_synced
from lastgasp_lightning.compat import Undo, replace_method

_TOGETHER = ("all_gather", "broadcast", "barrier")
"""Of a strategy: what all ranks call together."""
_LOG = ("name", "value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
"""The first arguments of `LightningModule.log`."""
NOT_TOGETHER = (
    "{name} was called within training_step, and all ranks must come to it equally often: with an ElasticLoader a rank "
    "may do more than one micro-batch of a step, or none. Log there with sync_dist=True at the end of an epoch "
    "(on_step=False, on_epoch=True) or without it, and collect from all ranks behind the step"
)
ONCE = "with an ElasticLoader an optimizer must call its closure once in each step, and {name} does not"
ACCUMULATES = "accumulate_grad_batches has become more than 1, and a step of an ElasticLoader is one batch"
NO_LOSS = "training_step has returned no loss: with an ElasticLoader each micro-batch needs one"


class ElasticSteps:
    """What one fit has to do for its `ElasticLoader`, if it has one.

    Args:
        trainer: of this fit.

    Attributes:
        loader: the one that is trained on; None where there is none.
        used: of a checkpoint that is resumed from (`ElasticLoader.used`); empty where there is none.
        found_rigid: as the loader's.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loader: ElasticLoader | None = None
        self.used: dict[str, Any] = {}
        self.found_rigid: Callable[[str], object] = str
        self._marks: dict[int, dict[str, Any]] = {}
        self._step: GlobalBatch | None = None
        self._within = self._is_first = False
        self._undo: list[Undo] = []

    def adopt(self, loaders: list[Any]) -> None:
        """Train on an `ElasticLoader` among the loaders that the fit has made.

        Raises:
            ConfigError: something of this fit would not be right with it.
        """
        found = [one for one in loaders if isinstance(one, ElasticLoader)]
        if not found:
            return
        loader, before, trainer = found[0], self.loader, self._trainer
        self._refuse(loader, loaders)
        if self.used or before is not None:
            loader.used.update(self.used or before.used)  # type: ignore[union-attr]
        self.loader, self.used, loader.known = loader, {}, True
        loader.found_rigid = lambda why: self.found_rigid(why)
        if trainer.strategy.model is not trainer.lightning_module:
            trainer.strategy.model = trainer.lightning_module
            gc.collect()  # DDP's hooks stay on the parameters while it lives
        if not self._undo:
            self._install()

    def release(self) -> None:
        """Undo everything. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self.loader = self._step = None

    def epoch_begins(self, epoch: int) -> None:
        """The loader is about to be iterated for this epoch."""
        if self.loader is not None:
            self.loader.set_epoch(epoch)

    def mark(self, step: int) -> None:
        """All stands on the boundary of `step`."""
        if self.loader is not None:
            self._marks = {**dict(list(self._marks.items())[-1:]), step: dict(self.loader.used)}

    def used_by(self, step: int) -> dict[str, Any] | None:
        """`ElasticLoader.used` at the boundary of `step`, which is the newest or the one before it."""
        if self.loader is None:
            return None
        return self._marks.get(step) or dict(self.loader.used)

    def _refuse(self, loader: ElasticLoader, loaders: list[Any]) -> None:
        trainer, strategy = self._trainer, self._trainer.strategy
        module, kwargs = trainer.lightning_module, getattr(strategy, "_ddp_kwargs", {})
        batch = loader.used["plan"]["batch"]
        synced = any(isinstance(one, SyncBatchNorm) for one in module.modules())
        found: tuple[tuple[bool, str, object, str, str], ...] = (
            (len(loaders) > 1, "train_dataloader", f"{len(loaders)} loaders", "the ElasticLoader alone",
             "Put what belongs together into one dataset."),
            (loader.model is not module, "ElasticLoader(model=...)", type(loader.model).__name__,
             f"the LightningModule that is trained ({type(module).__name__})", "Give it self."),
            (type(strategy) not in (DDPStrategy, SingleDeviceStrategy), "strategy", type(strategy).__name__,
             "'ddp' or a single device", "Its ranks must each hold the whole model."),
            (not module.automatic_optimization, "automatic_optimization", False, "True",
             "A loop with manual optimization is one for lastgasp.pytorch.train."),
            (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches", trainer.accumulate_grad_batches, "1",
             "A step has `ranks` micro-batches already: give ElasticLoader more ranks, or a larger batch_size."),
            (batch != "constant", "ElasticLoader(batch=...)", batch, "'constant'",
             "Lightning counts the batches of an epoch before it begins."),
            (loader.plan.samples < loader.plan.ranks, "dataset", f"{loader.plan.samples} samples",
             f"at least {loader.plan.ranks}", "Each rank must have some in the first step of an epoch."),
            (synced, "sync_batchnorm", True, "False", "Ranks do unequal numbers of micro-batches."),
            (not are_synced(kwargs), "broadcast_buffers", False, "True",
             "Buffers are those that the first micro-batch leaves."),
            (getattr(strategy, "_ddp_comm_hook", None) is not None, "ddp_comm_hook", "one", "None",
             "The loader sums the gradients, not DDP."),
        )  # fmt: skip
        for wrong, field, value, allowed, remedy in found:
            if wrong:
                raise ConfigError(f"{field}, with an ElasticLoader", value, allowed, remedy)

    # -- a step -------------------------------------------------------------------------------------------

    def _install(self) -> None:
        trainer = self._trainer
        strategy, optimization = trainer.strategy, trainer.fit_loop.epoch_loop.automatic_optimization
        self._convert = trainer.precision_plugin.convert_input
        self._before_transfer = trainer.lightning_module._on_before_batch_transfer
        self._transfer = strategy.batch_to_device
        self._undo = [
            replace_method(trainer.precision_plugin, "convert_input", _left_alone),
            replace_method(trainer.lightning_module, "_on_before_batch_transfer", _left_alone),
            replace_method(strategy, "batch_to_device", self._taken),
            replace_method(optimization, "_make_closure", self._closure_of),
            replace_method(trainer.lightning_module, "log", self._logged),
            *(replace_method(strategy, name, self._together(name)) for name in _TOGETHER if hasattr(strategy, name)),
        ]

    def _taken(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hooks get a list of this rank's micro-batches: iterating over the step itself would do it."""

        def batch_to_device(batch: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(batch, GlobalBatch):
                return original(batch, *args, **options)
            self._step = batch
            return [one.batch for one in batch.loaded]

        return batch_to_device

    def _logged(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(*args: Any, **options: Any) -> Any:
            given = {**dict(zip(_LOG, args, strict=False)), **options} if self._within else {}
            if given.get("sync_dist") and given.get("on_step") is not False:
                raise UsageError(NOT_TOGETHER.format(name="self.log(..., on_step=True, sync_dist=True)"))
            own = not given.get("sync_dist") and not isinstance(given.get("value"), Metric)
            if self._within and own and not self._is_first:
                return None  # else a mean over the epoch would depend on how many ranks there are
            return original(*args, **options)

        return log

    def _together(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def checked(*args: Any, **options: Any) -> Any:
                if self._within:
                    raise UsageError(NOT_TOGETHER.format(name=f"{name}()"))
                return original(*args, **options)

            return checked

        return make

    def _closure_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_closure(kwargs: dict[str, Any], optimizer: Any, batch_idx: int) -> Any:
            step, self._step = self._step, None
            if step is None:
                raise UsageError("an ElasticLoader needs a training_step(self, batch, batch_idx), not dataloader_iter")
            inner = original(kwargs, optimizer, batch_idx)
            if self._trainer.accumulate_grad_batches != 1 and inner._backward_fn is not None:  # as in SWA
                raise UsageError(ACCUMULATES)
            return _StepClosure(self, step, kwargs, optimizer, inner)

        return make_closure

    def do(self, step: GlobalBatch, closure: Closure, run: Callable[[Any], ClosureResult]) -> ClosureResult:
        """All of this rank's micro-batches. The result is that of the step's first one among them.

        Args:
            closure: Lightning's own; run: does `training_step` with a batch on its device.
        """
        logs, results = self._trainer._logger_connector, self._trainer._results
        first_iteration, found = logs._first_loop_iter, None
        step.loaded.reverse()  # what is logged, and is not of all ranks, is of the first one, however many it does
        if closure._zero_grad_fn is not None:  # before the loader looks: an update may have been skipped by the scaler
            closure._zero_grad_fn()
        for batch, one in zip(step, step.loaded, strict=True):
            self._within, self._is_first = True, one is step.loaded[-1]
            try:
                with as_rank(one.number, step.micros):
                    result = self._micro_batch(batch, closure, run)
                logs._first_loop_iter, found = False, result  # else Lightning forgets what the one before has logged
            finally:
                self._within = False
        logs._first_loop_iter = first_iteration
        if found is not None:
            return found
        results.batch_size = 0  # of what hooks log behind it
        return ClosureResult(torch.zeros((), device=self._trainer.strategy.root_device))

    def _micro_batch(self, batch: Any, closure: Closure, run: Callable[[Any], ClosureResult]) -> ClosureResult:
        results = self._trainer._results
        batch = self._transfer(self._before_transfer(self._convert(batch), dataloader_idx=0), dataloader_idx=0)
        results.batch, results.batch_size = batch, None
        result = run(batch)
        if result.closure_loss is None:
            raise UsageError(NO_LOSS)
        if closure._backward_fn is not None:
            closure._backward_fn(result.closure_loss)
        return result


class _StepClosure(Closure):
    """Of a step with micro-batches."""

    def __init__(
        self, steps: ElasticSteps, step: GlobalBatch, kwargs: dict[str, Any], optimizer: Any, inner: Closure
    ) -> None:
        super().__init__(inner._step_fn, inner._backward_fn, inner._zero_grad_fn)
        self._steps, self._global, self._kwargs, self._optimizer = steps, step, kwargs, optimizer

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Called by the optimizer."""
        if self._global.done:
            raise UsageError(ONCE.format(name=type(self._optimizer).__name__))
        return self._steps.do(self._global, self, self._run)

    def _run(self, batch: Any) -> ClosureResult:
        optimization = self._steps._trainer.fit_loop.epoch_loop.automatic_optimization
        given = {**self._kwargs, next(iter(self._kwargs)): batch}
        result: ClosureResult = optimization._training_step(given)
        return result


def _left_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is done with a batch is done with each micro-batch."""

    def method(batch: Any, *args: Any, **options: Any) -> Any:
        return batch if isinstance(batch, GlobalBatch) else original(batch, *args, **options)

    return method
