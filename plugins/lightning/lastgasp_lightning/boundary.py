"""The events of a step: when the update begins and ends, and the order of callbacks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lastgasp_lightning.compat import Undo, own_dict, replace_method

log = logging.getLogger("lastgasp")

_Event = Callable[[], None]


class UpdateWatch:
    """Reports when parameters begin to change and when they have changed.

    Automatic optimization: `begin` is called by the callback in `on_before_optimizer_step` (torch's own
    pre-hook fires before the forward pass there, docs/facts/lightning.md); torch's post-hook ends the update.
    Where the module's `optimizer_step` calls the closure itself, the hook is not called: a step without a closure, or
    one of an optimizer that the optimizer holds (SAM's), begins it. Manual optimization: torch's pre-hook begins; the
    window stays open until `close`, because another optimizer may follow.

    Args:
        before_update: called once per batch, before the first parameter changes.
        further: called before the update of each further optimizer of the batch (manual optimization).

    Attributes:
        aside: returns whether the optimizers' steps do not belong to training (a tuner's).
        uncounted: manual optimization: an optimizer within one has made a step, and Lightning has counted none.
    """

    def __init__(self, before_update: _Event, further: _Event) -> None:
        self._before_update, self._further = before_update, further
        self._handles: list[Any] = []
        self.aside: Callable[[], bool] = lambda: False
        self.automatic = True
        self.begun = self.inside = self.uncounted = False
        self.baseline = (0, 0)
        self._counters: dict[str, int] = {"ready": 0, "completed": 0}

    def install(self, trainer: Any) -> None:
        """Hook the optimizers of `trainer` (on_fit_start: they exist then). Idempotent."""
        if self._handles:
            return
        self.automatic = bool(trainer.lightning_module.automatic_optimization)
        self._counters = vars(trainer.fit_loop.epoch_loop.scheduler_progress.total)
        own = is_overridden("optimizer_step", trainer.lightning_module)
        for optimizer in trainer.optimizers:
            if not self.automatic:
                self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            elif own:
                self._handles.append(optimizer.register_step_pre_hook(self._without_closure))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            for inner in [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]:
                self._handles.append(inner.register_step_pre_hook(self._inner))

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def begin(self) -> None:
        """Parameters are about to change. Further calls in one batch matter only in manual optimization."""
        self.inside = True
        if not self.begun:
            self.baseline = (self._counters["ready"], self._counters["completed"])
            self._before_update()
            self.begun = True
        elif not self.automatic:
            self._further()

    def close(self) -> None:
        """The boundary was captured: the window is over."""
        self.begun = self.inside = self.uncounted = False

    def _without_closure(self, _: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not any(args[1:]) and not any(options.values()):  # the first one is the optimizer
            self._before_step()

    def _inner(self, *_: object) -> None:
        if self.automatic:
            self._before_step()
        self.uncounted = not (self.automatic or self.begun)

    def _before_step(self, *_: object) -> None:
        if not self.aside():
            self.begin()

    def _after_step(self, *_: object) -> None:
        self.inside = False


def steps_of(epoch: Any, automatic: bool) -> dict[str, int]:
    """The live counters whose `completed` is the loop's `global_step`, which costs a microsecond to ask for."""
    if automatic:
        total = epoch.automatic_optimization.optim_progress.optimizer.step.total
    else:
        total = epoch.manual_optimization.optim_step_progress.total
    counters: dict[str, int] = vars(total)
    return counters


def leave_out(callback: Callback, owner: type[Callback], names: tuple[str, ...]) -> Undo:
    """Make Lightning skip hooks of this one callback: it calls everything callable, at 2 to 4 us each.

    Hooks that a subclass of `owner` defines are kept.
    """
    left = [n for n in names if getattr(type(callback), n) is getattr(owner, n) and n not in vars(callback)]
    own_dict(callback).update(dict.fromkeys(left))
    return lambda: [vars(callback).pop(name, None) for name in left].clear()


def reorder(trainer: Any, callback: Callback) -> None:
    """Move `callback` behind all ordinary callbacks and before Checkpoint ones.

    Call in `setup`. Assigns a new list: Lightning is iterating over the old one.
    """
    others = [cb for cb in trainer.callbacks if cb is not callback]
    ordinary = [cb for cb in others if not isinstance(cb, Checkpoint)]
    trainer.callbacks = [*ordinary, callback, *(cb for cb in others if isinstance(cb, Checkpoint))]


def wrap_batch_end(module: Any, before: _Event, after: _Event) -> Undo:
    """Call `before` and `after` around the module's own `on_train_batch_end`, if it has one.

    It runs after all callbacks and may change weights (an EMA teacher). `after` is not called when it raises.
    """
    if not is_overridden("on_train_batch_end", module):
        return lambda: None

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def on_train_batch_end(*args: Any, **kwargs: Any) -> Any:
            before()
            result = original(*args, **kwargs)
            after()
            return result

        return on_train_batch_end

    return replace_method(module, "on_train_batch_end", make)


def never_saved(module: Any, copied: bool) -> str:
    """In which code of the module an exception leaves a state that its rank cannot save; empty if in none.

    copied: the step before is kept while `training_step` makes its updates.
    """
    manual = "" if module.automatic_optimization or copied else "training_step behind an optimizer.step()"
    own = "the module's own on_train_batch_end" if is_overridden("on_train_batch_end", module) else ""
    return " or ".join(filter(None, (manual, own)))


def before_calls(owner: object, name: str, event: _Event) -> Undo:
    """Call `event` before each call of the method `name` of this one object."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            event()
            return original(*args, **kwargs)

        return method

    return replace_method(owner, name, make)


def before_updates(precision: Any, event: _Event) -> Undo | None:
    """Call `event` before each change of parameters, once gradients are clipped.

    Costs a tenth of the hook `on_before_optimizer_step`, which is called from the same place.

    Returns:
        None where this precision plugin is not Lightning's own, and only the hook reports it.
    """
    ways = (getattr(type(precision), name, None) for name in ("optimizer_step", "_wrap_closure", "_after_closure"))
    if not all(way is not None and way.__module__.startswith("lightning.pytorch.") for way in ways):
        return None

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def after_closure(model: Any, optimizer: Any) -> None:
            original(model, optimizer)
            event()

        return after_closure

    return replace_method(precision, "_after_closure", make)


def finish_batch(trainer: Any, watch: UpdateWatch) -> bool:
    """Complete Lightning's bookkeeping of a batch whose update is done, after an exception cut it short.

    Returns:
        False when the state cannot be known: the exception came out of the update itself, out of a scheduler
        step, or, in manual optimization, out of `training_step`.
    """
    epoch = trainer.fit_loop.epoch_loop
    batch = epoch.batch_progress
    if watch.inside:
        return False
    if not watch.automatic:
        return bool(batch.current.processed == batch.current.ready)
    step = epoch.automatic_optimization.optim_progress.optimizer.step
    if step.current.completed < step.current.ready:
        step.increment_completed()
    if batch.current.processed < batch.current.ready:
        batch.increment_processed()
    return _finish_schedulers(epoch, watch.baseline)


def _finish_schedulers(epoch: Any, baseline: tuple[int, int]) -> bool:
    total = epoch.scheduler_progress.total
    done = total.completed - baseline[1]
    if total.ready - baseline[0] != done:
        return False  # raised inside lr_scheduler_step: it may have stepped or not
    if done == 0:
        try:
            epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
            if epoch._num_ready_batches_reached():
                epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        except Exception:  # a user's scheduler; on_exception must complete, and the state is then unknown
            log.exception("a scheduler raised while the step was being completed: the step cannot be saved here")
            return False
        return True
    return bool(done == _due_schedulers(epoch))


def _due_schedulers(epoch: Any) -> int:
    """How many schedulers Lightning steps between the update and on_train_batch_end of this batch."""
    trainer = epoch.trainer
    last = epoch._num_ready_batches_reached()
    counts = {"step": epoch.batch_idx + 1, "epoch": trainer.current_epoch + 1 if last else None}
    due = 0
    for config in trainer.lr_scheduler_configs:
        count = counts.get(config.interval)
        due += not config.reduce_on_plateau and count is not None and count % config.frequency == 0
    return due
