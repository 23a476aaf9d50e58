"""What is remembered of Lightning at a boundary, besides the auxiliary state: counters, schedulers, metrics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.progress import _BaseProgress
from torch.optim.lr_scheduler import LRScheduler

from lastgasp.adapter.torch import Flags, schedule_of, values_of, which_weights
from lastgasp_lightning.compat import own_dict
from lastgasp_lightning.extrastate import ExtraStates
from lastgasp_lightning.saves import Saves
from lastgasp_lightning.uservalues import ValuesOfSteps

_Path = tuple[str, ...]
# Hooks that run after a boundary and before the next update, outside validation and epoch end. Callbacks with
# a state and one of these are captured at every boundary; all others only when validation or epoch end begins.
_MID_STEP = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
             "on_before_optimizer_step", "on_train_epoch_start")  # fmt: skip


@dataclass(slots=True)
class Snapshot:
    """The state of the loops at one boundary. Holds references and shallow copies; nothing is cloned.

    Attributes:
        asked: to stop, whether or not it may yet; stopping: and may not yet, because of `min_steps` or `min_epochs`.
        drawn: batches of the epoch that `training_step` had drawn itself (`dataloader_iter`); else None.
        accumulate: batches of a step, where a callback has changed their number since the fit began (else None).
        validated: batches by validation loader: the steps at which loggers get what `validation_step` logs.
    """

    step: int
    counters: tuple[Any, ...]
    names: list[tuple[str, ...]]
    stepped: int
    reloads: tuple[float, float]
    asked: bool
    stopping: bool
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    results: list[tuple[Any, ...]]
    metrics: dict[str, Any]
    logging: tuple[bool | None, str | None]
    callbacks: dict[str, Any]
    extra: tuple[Any, dict[str, Any], int]
    flags: tuple[bytes, bytes, bytes]
    accumulate: int | None
    drawn: int | None
    validated: dict[int, int]
    all_callbacks: bool = False


class Snapshotter:
    """Takes snapshots of one trainer. Made when optimizers and schedulers stand (on_fit_start).

    Args:
        values: plain ones of the user's objects, if they are kept.
        sharded: a snapshot may be saved when the next boundary is reached: nothing in it may be taken later.
    """

    def __init__(self, trainer: Any, sharded: bool = False, values: ValuesOfSteps | None = None) -> None:
        self._plain = values
        self._trainer, self._strategy = trainer, trainer.strategy
        self._fit, self._accumulate = trainer.fit_loop, trainer.accumulate_grad_batches
        self._epoch = trainer.fit_loop.epoch_loop
        self._val = self._epoch.val_loop
        self._logs = trainer._logger_connector
        self._paths, self._dicts = _trackers(trainer.fit_loop)
        for config in trainer.strategy.lr_scheduler_configs:
            if isinstance(config.scheduler, LRScheduler):  # its `state_dict` asks for `vars` at each boundary
                own_dict(config.scheduler)
        self._values = values_of()
        self._names: list[tuple[str, ...]] = []
        self._named = -1
        self._fetches, self._draws = object, False
        self.saves = Saves(trainer)
        self.extra, self.flags = ExtraStates(trainer, sharded), Flags(trainer.lightning_module, gradients=True)
        self._stateful = stateful_callbacks(trainer)
        hooks = (*_MID_STEP, "on_train_batch_end") if _accumulates(trainer) else _MID_STEP
        self._mid_step = [cb for cb in self._stateful if sharded or any(_overrides(cb, hook) for hook in hooks)]

    def take(self, step: int) -> Snapshot:
        """Remember everything as it stands. A few microseconds."""
        if self._plain is not None:
            self._plain.take(step)
        logs, epoch, strategy, trainer = self._logs, self._epoch, self._strategy, self._trainer
        results, fit, val = epoch._results, self._fit, self._val
        fetcher, schedulers = fit._data_fetcher, strategy.lr_scheduler_configs
        if type(fetcher) is not self._fetches:
            self._fetches, self._draws = type(fetcher), isinstance(fetcher, _DataLoaderIterDataFetcher)
        counters = self._values(self._dicts)
        if len(counters) != self._named:  # hardly ever after the first time: an attribute more
            self._names, self._named = [tuple(d) for d in self._dicts], len(counters)
        return Snapshot(
            step,
            counters,
            self._names,
            epoch._batches_that_stepped,
            (fit._last_train_dl_reload_epoch, val._last_val_dl_reload_epoch),
            asked := bool(trainer.should_stop),
            asked and not fit._can_stop_early,
            # callbacks may exchange them
            [schedule_of(c.scheduler) for c in schedulers] if schedulers else [],
            [[*map(_hyperparameters, o.param_groups)] for o in strategy.optimizers],
            [_metric(key, m) for key, m in results.items()] if results else [],
            logs._callback_metrics.copy(),
            (logs._first_loop_iter, logs._current_fx),
            _states(self._mid_step) if self._mid_step else {},
            self.extra.take(step),
            self.flags.take(),
            accumulate if (accumulate := trainer.accumulate_grad_batches) != self._accumulate else None,
            fetcher.fetched if self._draws else None,
            dict(val._seen_batches_per_dataloader),
        )

    def loops(self, snapshot: Snapshot) -> dict[str, Any]:
        """Every progress, as at the boundary: key in the loops' state dict -> value."""
        tree: dict[str, Any] = {}
        counters = iter(snapshot.counters)
        for path, names in zip(self._paths, snapshot.names, strict=True):
            node = tree
            for name in path:
                node = node.setdefault(name, {})
            values = zip(names, counters, strict=False)  # in this order: the names end first
            node.update({k: v for k, v in values if not isinstance(v, _BaseProgress)})
        return tree

    def flags_of(self, snapshot: Snapshot) -> dict[str, list[str]]:
        """For a checkpoint. Gradients are those of now: which ones a step under way has added it adds again.

        Where `zero_grad` sets them to None it does so again, too, before they count.
        """
        return self.flags.record((*snapshot.flags[:2], self.flags.graded()))

    def missing(self, snapshot: Snapshot, exchanged: bool) -> str:
        """As `ExtraStates.missing`."""
        return self.extra.missing(snapshot.extra, exchanged or self._exchanged(snapshot))

    def put(self, checkpoint: dict[str, Any], snapshot: Snapshot) -> None:
        """As `ExtraStates.put`, and `Saves.put`."""
        self.saves.put(checkpoint, snapshot.step)
        self.extra.put(checkpoint, snapshot.extra, self._exchanged(snapshot))

    def _exchanged(self, snapshot: Snapshot) -> bool:
        """A schedule-free optimizer has put other weights into the model than at the boundary."""
        return which_weights(o.param_groups for o in self._strategy.optimizers) != which_weights(snapshot.groups)

    def add_callbacks(self, snapshot: Snapshot, mark: Callable[[], None]) -> None:
        """Remember the states of ordinary callbacks, before validation or epoch end changes them.

        `mark` is called where a device has been given copies to make that a gasp reads (`QueuedWork.mark`), and nowhere
        else: what is queued besides may never be done.
        """
        if self._plain is not None:
            self._plain.verify()
        moving = self.extra.moving
        held = moving.held(snapshot.step)
        moving.aside()
        if (now := moving.held(snapshot.step)) and now is not held:
            mark()
        if not snapshot.all_callbacks:
            states = _states(self._stateful)
            if _on_device(states):
                mark()
            snapshot.callbacks = {**states, **snapshot.callbacks}
            snapshot.all_callbacks = True


def stateful_callbacks(trainer: Any) -> list[Callback]:
    """Callbacks with a state of their own, but Checkpoint ones: those track files, and are taken live."""
    return [cb for cb in trainer.callbacks if _overrides(cb, "state_dict") and not isinstance(cb, Checkpoint)]


def _trackers(fit_loop: Any) -> tuple[list[_Path], tuple[dict[str, Any], ...]]:
    """Each object with counters below `fit_loop`: where it stands, and its `__dict__` (never replaced)."""
    found: list[tuple[_Path, dict[str, Any]]] = []

    def walk_progress(path: _Path, value: _BaseProgress) -> None:
        if any(not isinstance(v, _BaseProgress) for v in vars(value).values()):
            found.append((path, own_dict(value)))
        for name, child in vars(value).items():
            if isinstance(child, _BaseProgress):
                walk_progress((*path, name), child)

    def walk(prefix: str, loop: Any) -> None:
        for name, value in own_dict(loop).items():
            if isinstance(value, _BaseProgress):
                walk_progress((prefix + name,), value)
            elif name in ("epoch_loop", "val_loop", "automatic_optimization", "manual_optimization"):
                walk(f"{prefix}{name}.", value)

    walk("", fit_loop)
    return [path for path, _ in found], tuple(d for _, d in found)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    copied = group.copy()
    del copied["params"]
    lr = copied.get("lr")
    if type(lr) is not float and isinstance(lr, torch.Tensor):  # schedulers fill a tensor learning rate in place
        copied["lr"] = lr.clone()
    return copied


def _metric(key: str, m: Any) -> tuple[Any, ...]:
    # Lightning replaces these tensors at each update, it never changes them (result.py, `update`)
    own = vars(m)  # it is a module, whose attributes are not found at once
    if not own["is_tensor"]:
        return key, m, None, None, None, None, own["has_reset"]
    size, cache = own.get("cumulated_batch_size"), own["_forward_cache"]
    return key, m, own["value"], size, cache, own["_computed"], own["has_reset"]


def _states(callbacks: list[Callback]) -> dict[str, Any]:
    return {cb.state_key: copy.deepcopy(cb.state_dict()) for cb in callbacks}


def _on_device(value: Any) -> bool:
    """Whether a callback's state has tensors on an accelerator."""
    if isinstance(value, torch.Tensor):
        return value.device.type not in ("cpu", "meta")
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_on_device, parts))


def _accumulates(trainer: Any) -> bool:
    """Whether a batch may end without an update, so that callbacks see batches that a resume repeats."""
    scheduled = any(isinstance(cb, GradientAccumulationScheduler) for cb in trainer.callbacks)
    manual = not trainer.lightning_module.automatic_optimization
    return bool(scheduled or manual or trainer.accumulate_grad_batches != 1)


def _overrides(callback: Callback, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(Callback, name)
