"""Automatic step marks of a Lightning fit: where a step's time goes, without a change of the user's code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch.strategies import Strategy

from lastgasp.adapter.torch import Sink, StepRanges
from lastgasp_lightning.boundary import before_calls
from lastgasp_lightning.compat import Undo, replace_method, require

_Method = Callable[..., Any]


class LightningMarks:
    """The marks of one fit. One object per `fit`; for the training thread only, except the gasp's save.

    `step N`: from the first fetch of its data to `step_end`, where N is the global step that it completes; with
    accumulated gradients over several batches. Validation, the end of an epoch and Checkpoint callbacks are not
    included: where validation interrupts an accumulation, the step begins anew after it.
    `dataloader`: the training thread's wait for a batch. Where Lightning cannot know the length of the data it fetches
    one batch ahead: the wait belongs to the step in which it took place.
    `forward`: `strategy.training_step`, which is the user's training_step with the loss, and DDP's forward pass (it
    broadcasts buffers, and may wait for rank 0 there). In manual optimization what comes before each backward pass.
    `backward`: `strategy.backward`; DDP reduces gradients in it, and waits for other ranks.
    `optimizer`: the update alone, after the gradients were clipped.
    `save_checkpoint`: the write, on the ranks that write; not the barrier after it. The gasp's is marked by the seam.

    Args:
        trainer: the Trainer, set up.
        marks: where they go.
    """

    def __init__(self, trainer: Any, marks: Sink) -> None:
        self._trainer = trainer
        self._undo: list[Undo] = []
        self._handles: list[Any] = []
        self._in_step = self._inside = self._went_back = False
        self._ranges = ranges = StepRanges(marks, trainer.strategy.root_device, trainer.global_step + 1)
        self._step, self._end_step, self._look = ranges.step, ranges.end_step, ranges.look
        self._forward, self._backward = ranges.forward, ranges.backward
        self._optimizer, self._dataloader, self._save = ranges.optimizer, ranges.dataloader, ranges.save

    # -- life cycle ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch this trainer's loops and strategy, hook its optimizers. Call in `on_train_start`. Idempotent.

        Raises:
            LightningChanged: this Lightning lacks something that is relied on; nothing stays patched.
        """
        if self._undo:
            return
        try:
            self._patch()
        except BaseException:
            self.close()
            raise

    def _patch(self) -> None:
        trainer, undo = self._trainer, self._undo
        strategy, epoch, fit = trainer.strategy, trainer.fit_loop.epoch_loop, trainer.fit_loop
        require(fit, "_data_fetcher")
        undo.append(replace_method(epoch, "_on_before_fetch", self._around_fetch_begin))
        undo.append(replace_method(epoch, "_on_after_fetch", self._around_fetch_end))
        automatic = trainer.lightning_module.automatic_optimization
        undo.append(replace_method(strategy, "training_step", self._around_forward if automatic else self._around_all))
        undo.append(replace_method(strategy, "backward", self._around_backward if automatic else self._within_all))
        undo.append(replace_method(strategy, "save_checkpoint", self._around_save))
        undo.append(before_calls(epoch.val_loop, "run", self._no_step))
        undo.append(before_calls(fit, "on_advance_end", self._no_step))
        for optimizer in trainer.optimizers:
            if not automatic:
                self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))
        self._ranges.communicate([strategy.model])

    def close(self) -> None:
        """Restore everything; open ranges are discarded. Idempotent."""
        while self._undo:
            self._undo.pop()()
        while self._handles:
            self._handles.pop().remove()
        self._ranges.close()

    @property
    def device_rows(self) -> Literal["host", "events"]:
        """The source of the times in the device rows (`StepRecorder.set_device_rows`)."""
        return self._ranges.device_rows

    # -- called by the callback ---------------------------------------------------------------------------

    def update_begins(self) -> None:
        """Call in `on_before_optimizer_step`: the update is next."""
        if self._inside:
            self._forward.cancel()
        self._optimizer.cancel()
        self._optimizer.begin()

    def step_end(self, step: int) -> None:
        """Call in `on_train_batch_end` where the batch completed `step`."""
        self._in_step = False
        self._end_step(step)
        self._optimizer.cancel()  # a gradient scaler skipped the update
        self._look()

    # -- the patches --------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._in_step = True
        self._step.begin()

    def _no_step(self) -> None:
        """Validation or the end of the epoch: what comes before belongs to no step any more."""
        self._in_step = False
        self._step.cancel()

    def _around_fetch_begin(self, original: _Method) -> _Method:
        begin = self._dataloader.begin

        def before_fetch() -> None:
            original()
            if not self._in_step:
                self._begin_step()
            begin()

        return before_fetch

    def _around_fetch_end(self, original: _Method) -> _Method:
        fit, dataloader = self._trainer.fit_loop, self._dataloader

        def after_fetch() -> None:
            if fit._data_fetcher.done:  # there was no other batch
                dataloader.cancel()
            else:
                dataloader.end()
            original()

        return after_fetch

    def _around_forward(self, original: _Method) -> _Method:
        begin, end = self._forward.begin, self._forward.end

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not self._in_step:  # the batch had been fetched before, or is fetched in here
                self._begin_step()
            begin()
            result = original(*args, **kwargs)
            end()
            return result

        return training_step

    def _around_backward(self, original: _Method) -> _Method:
        begin, end = self._backward.begin, self._backward.end

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            begin()
            result = original(*args, **kwargs)
            end()
            return result

        return backward

    def _around_all(self, original: _Method) -> _Method:
        """Manual optimization: backward passes and updates are inside."""

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not self._in_step:
                self._begin_step()
            self._inside, self._went_back = True, False
            self._forward.begin()
            result = original(*args, **kwargs)
            if self._went_back:
                self._forward.cancel()
            else:
                self._forward.end()
            self._inside = False
            return result

        return training_step

    def _within_all(self, original: _Method) -> _Method:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                self._forward.end()
            self._backward.begin()
            result = original(*args, **kwargs)
            self._backward.end()
            if self._inside:
                self._went_back = True
                self._forward.begin()
            return result

        return backward

    def _before_update(self, *_: object) -> None:
        self.update_begins()

    def _after_update(self, *_: object) -> None:
        self._optimizer.end()
        if self._inside:
            self._forward.begin()

    def _around_save(self, original: _Method) -> _Method:
        strategy = self._trainer.strategy
        all_write = type(strategy).save_checkpoint is not Strategy.save_checkpoint

        @functools.wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if not (all_write or strategy.is_global_zero):
                return original(*args, **kwargs)
            with self._save:
                return original(*args, **kwargs)

        return save_checkpoint
