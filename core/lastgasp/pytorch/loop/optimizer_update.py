"""The time between a step's first update and its end, followed by hooks of the optimizers and of the model."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lastgasp.pytorch.aux_state import NOTHING, Since
from lastgasp.pytorch.loop.copies import Copies
from lastgasp.pytorch.loop.hooks import follow_forward

log = logging.getLogger("lastgasp")

MANY = 50
"""Updates in one step that make it likely that the loop does not report where its steps end."""
IDLE = 20
"""Calls of `updated` without any update or step that lead to a warning. A scaler skips a few at first."""

_Event = Callable[[], None]


class OptimizerUpdate:
    """Knows whether the state is between two steps.

    The window opens at the first update of a step and closes when the loop's body has ended. Inside it this rank
    cannot be asked for its state, unless a copy of the previous state was taken (`copies.valid`). A copy is taken once
    the loop has been seen to wait for other ranks in its window, to draw random numbers there, to update more than
    once in a step, or to give its optimizer a closure: a fault may then block it there for ever.

    Args:
        optimizers: whose `step` is followed.
        models: whose forward passes are followed.
        copies: holds the copies; None if they would be useless.
        events: three calls. Before the first parameter changes: may wait at the update gate and raise there. When
            the copy is complete. Before each further update of the step, and when one with a closure has ended: random
            numbers may have been drawn, and buffers changed, since the previous call.

    Attributes:
        in_progress: an update of this step has begun.
        updates: how many of this step are done.
        copying: whether copies are taken.
        begins: called before the first forward pass of each step.
    """

    def __init__(
        self, optimizers: Sequence[Any], models: Sequence[Any], copies: Copies | None, events: tuple[_Event, ...]
    ) -> None:
        self.copies = copies
        self._opens, self._copied, self._drawn = events
        self.in_progress = False
        self._depth = 0
        self.copying = copies is not None and len(optimizers) > 1  # more than one update per step is likely
        self.updates, self.usual = 0, len(optimizers)
        self._waited, self._since, self._idle = False, NOTHING, 0
        self.begins: _Event = _nothing_begins
        self._fresh = True
        self._calls = collectives_begun()
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self.before_step))
            self._handles.append(optimizer.register_step_post_hook(self.after_step))
        for model in models:
            self._undo.append(follow_forward(model, self._before_forward, _nothing))

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
        while self._undo:
            self._undo.pop()()

    def begin(self, closure: bool = False) -> None:
        """Parameters are about to change. The first call in a step opens the window."""
        if self.in_progress:
            if not self.inside:
                self._drawn()
            return
        self._opens()
        self.in_progress, self.updates = True, 0
        if self.copies is not None and (self.copying or closure):
            self._copy(self.copies)

    def _copy(self, copies: Copies) -> None:
        first = not copies.nbytes
        try:
            copies.take()
        except Exception as error:  # no memory for it; or the user's own `state_dict`, in the middle of a step
            log.warning("no copy of the state can be kept (%s: %s): a fault between an update and the end of its step "
                        "may cost that step", type(error).__name__, str(error).partition("\n")[0])  # fmt: skip
            self.copies, self.copying = None, False
            return
        self.copying = True
        if first:
            log.info("this loop waits between an update and the end of its step, so a copy of the state is kept from "
                     "now on: %.1f MB", copies.nbytes / 1e6)  # fmt: skip
        self._copied()

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy of the state at the end of the last step."""
        return self.copies is not None and self.copies.valid

    @property
    def inside(self) -> bool:
        """An optimizer is running at this moment."""
        return self._depth > 0

    @property
    def more_to_come(self) -> bool:
        """Whether the loop is likely to draw random numbers or change buffers yet in this step, as in the previous one.

        A further update has a forward pass of its own before it.
        """
        return any(self._since) or self.updates + 1 < self.usual

    def missing(self, step: int) -> None:
        """The loop has reported a step without an update; `step`: completed ones."""
        self._idle += 1
        if self._idle == IDLE and not step:
            log.warning("updated() was called %d times, and no step was complete: no optimizer of the TorchState has "
                        "changed parameters (skipped by a GradScaler?). Where the loop changes them otherwise, it must "
                        "call updating() before", IDLE)  # fmt: skip

    def close(self, since: Since) -> None:
        """The step has ended and was captured.

        Args:
            since: what happened since the window opened.
        """
        self._since = since
        waited = self._waited or self.updates > 1 or since.drew or self._called()
        if waited and self.copies is not None:
            self.copying = True
        if self.copies is not None:
            self.copies.valid = False
        self.usual = self.updates
        self.in_progress = self._waited = False
        self._depth, self._fresh = 0, True

    def _called(self) -> bool:
        """Whether a collective began since the last update."""
        return collectives_begun() != self._calls

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer is about to change parameters."""
        if torch.compiler.is_dynamo_compiling():
            _untraced(self._before_step, args, kwargs)
        else:
            self._before_step(args, kwargs)

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_initializing():
            self.begin(closure=_has_closure(args, kwargs))
            self._depth += 1

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """It has."""
        if torch.compiler.is_dynamo_compiling():
            _untraced(self._after_step, args, kwargs)
        else:
            self._after_step(args, kwargs)

    def _after_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_initializing():
            return
        self._depth -= 1
        if self._depth:  # `super().step()` of a derived optimizer has hooks of its own
            return
        if _has_closure(args, kwargs):
            self._drawn()
        self.updates += 1
        if self.updates == MANY and self.usual < MANY:
            log.warning("%d updates in one step: a step ends where the loop asks s.batches() for the next batch, or "
                        "calls s.updated(); a fault goes back to the end of a step", MANY)  # fmt: skip
        self._calls = collectives_begun()

    def _before_forward(self, module: Any) -> None:
        if self._fresh and not self.in_progress:
            self._fresh = False
            self.begins()
        if self.in_progress and not self.inside:
            self._waited = True


def is_initializing() -> bool:
    """Whether the update under way is none: torch's `get_state_dict` makes one without gradients for an optimizer that
    has no state yet, so that there is one to load into. Call it in the hook of an update."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = None if code is None else sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(hook: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In a step that torch compiles: traced, what the hooks do could come behind the update."""
    hook(args, kwargs)


def _nothing_begins() -> None:
    """Until a run has set what is to be called."""


def _nothing(module: Any) -> None:
    """After a forward pass."""


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """For `step`, whose first argument is the optimizer itself."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None


def collectives_begun() -> int:
    """Number of collectives that this rank has begun, of all groups; as far as torch counts them."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    found = 0
    groups: tuple[Any, ...] = tuple(distributed_c10d._world.pg_map)  # the stub lacks the method
    for group in groups:
        with contextlib.suppress(RuntimeError, AttributeError):
            found += int(group._get_sequence_number_for_group())
    return found
