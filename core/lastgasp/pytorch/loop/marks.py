"""Phases and step marks of a custom loop, by hooks: where a step's time goes, without a change of the loop."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from lastgasp.adapter.hooks import replace_attribute
from lastgasp.pytorch.loop.hooks import follow_forward, hidden
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.pytorch.processgroups import process_groups
from lastgasp.pytorch.stepranges import StepRanges
from lastgasp.session import Session as Engine


class LoopMarks:
    """The marks of one session; for the training thread only, except `saving`.

    `step N`: from the first fetch of its data to the end of the loop's body that completes it; an evaluation in the
    body lies inside. `dataloader`: the wait for a batch. `forward`: the model's forward pass in training mode.
    `backward`: `loss.backward()`; DDP reduces gradients in it, and waits for other ranks. `optimizer`: `step` of an
    optimizer. `save_checkpoint`: the session's writes, also the gasp's.

    Args:
        state: its models and optimizers are hooked.
        engine: gets each phase, for the hang watchdog; has the recorder, if there is one.
        first: number of the first step.
        backward_over: called after each backward pass of the training thread that did not raise.
        backward_begins: called before each.

    Attributes:
        forward_begins: called before each forward pass, with whether it is in training mode.
    """

    def __init__(
        self, state: TorchState, engine: Engine, first: int, backward_over: Callable[[], None],
        backward_begins: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._engine, self._thread, self._backward_over = engine, threading.get_ident(), backward_over
        self._backward_begins = backward_begins
        self.forward_begins: Callable[[bool], None] = lambda training: None
        device = next(iter(state.devices()), torch.device("cpu"))
        self._ranges = StepRanges(engine.recorder.marks, device, first) if engine.recorder is not None else None
        self._in_step, self._depth = False, 0
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._models = list(state.models.values())
        for model in self._models:
            self._undo.append(follow_forward(model, self._before_forward, self._after_forward))
        self._backward = _replace_backward(self._around_backward)
        self._undo.append(replace_attribute(torch.serialization, "_save", self._around_save))
        if self._ranges is not None:
            for optimizer in state.optimizers.values():
                self._handles.append(optimizer.register_step_pre_hook(self._before_update))
                self._handles.append(optimizer.register_step_post_hook(self._after_update))
            self._ranges.communicate(state.models.values())
        if engine.recorder is not None:
            engine.recorder.set_groups(process_groups())
            engine.recorder.set_device_rows(self.device_rows)

    @property
    def device_rows(self) -> Literal["host", "events"]:
        """Source of the times in the device rows."""
        return self._ranges.device_rows if self._ranges is not None else "host"

    def close(self) -> None:
        """Remove all hooks. Idempotent."""
        self._backward()
        while self._handles:
            self._handles.pop().remove()
        while self._undo:
            self._undo.pop()()
        if self._ranges is not None:
            self._ranges.close()

    # -- called by the session ----------------------------------------------------------------------------

    def fetching(self) -> None:
        """The loop asks for a batch."""
        self._engine.progress("data")
        if self._ranges is not None:
            self._begin_step(self._ranges)
            self._ranges.dataloader.begin()

    def fetched(self, there: bool) -> None:
        """The batch has arrived; or there was none, and what follows belongs to no step."""
        self._engine.progress("forward" if there else "data")
        if self._ranges is None:
            return
        if there:
            self._ranges.dataloader.end()
        else:
            self._ranges.dataloader.cancel()
            self._ranges.step.cancel()
            self._in_step = False

    def step_end(self, step: int) -> None:
        """`step` is complete."""
        if self._ranges is not None:
            self._ranges.end_step(step)
            self._in_step = False
            self._ranges.look()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the write of a checkpoint."""
        if self._ranges is None:
            yield
            return
        with self._ranges.save:
            yield

    # -- hooks --------------------------------------------------------------------------------------------

    def _begin_step(self, ranges: StepRanges) -> None:
        if not self._in_step:
            self._in_step = True
            ranges.step.begin()

    def _before_forward(self, module: Any) -> None:
        self.forward_begins(module.training)
        if not module.training:
            self._engine.progress("validation")
            return
        self._engine.progress("forward")
        self._depth += 1
        if self._ranges is not None and self._depth == 1:
            self._begin_step(self._ranges)
            self._ranges.forward.begin()

    def _after_forward(self, module: Any) -> None:
        if not module.training or not self._depth:
            return
        self._depth -= 1
        if self._ranges is not None and not self._depth:
            self._ranges.forward.end()

    def _around_backward(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # activation checkpoints run backward inside a backward pass
            return original(*args, **kwargs)
        self._engine.progress("backward")
        self._backward_begins()
        if self._ranges is not None:
            self._ranges.backward.begin()
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if self._ranges is not None:
                self._ranges.backward.cancel()
            self._backward_over()  # a signal's handler raises behind it (a loader's worker has died): gradients are out
            raise
        if self._ranges is not None:
            self._ranges.backward.end()
        self._backward_over()
        return result

    def _around_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Any `torch.save` of the training thread, as those of torch.distributed.checkpoint, is the user's own save."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._engine.progress("save")
            with hidden(self._models):
                return original(*args, **kwargs)

        return save

    def _before_update(self, *_: object) -> None:
        assert self._ranges is not None
        self._ranges.optimizer.cancel()
        self._ranges.optimizer.begin()

    def _after_update(self, *_: object) -> None:
        assert self._ranges is not None
        self._ranges.optimizer.end()


def _replace_backward(around: Callable[..., Any]) -> Callable[[], None]:
    """Call `around(original, args, kwargs)` for `torch.autograd.backward`, which `Tensor.backward` looks up there."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        busy = False

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if busy:
                return original(*args, **kwargs)
            busy = True
            try:
                return around(original, args, kwargs)
            finally:
                busy = False

        return backward

    return replace_attribute(torch.autograd, "backward", make)
