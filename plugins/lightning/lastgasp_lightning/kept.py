"""A trainer and its module between two entries of `fit`: as a new process would have them, but for the weights.

What a new process would not have: counters of loops, wrappers, optimizers, the states of Lightning's callbacks, modes
of an evaluation, gradients, metrics. All of that is in the checkpoint, or made when `fit` begins. What callbacks and
modules of the user's keep besides their state is put back by `uservalues`.
"""

from __future__ import annotations

import copy
import gc
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, TQDMProgressBar
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.distributed import distributed_c10d
from torchmetrics import Metric

from lastgasp.adapter.again import Began, KeptModules, Places, UserValues, renew_scaler
from lastgasp_lightning.ranks import is_sharded_by
from lastgasp_lightning.unsharded import KeptParts

log = logging.getLogger("lastgasp")

_BARS = ("_train_progress_bar", "_val_progress_bar")


class KeptTrainer:
    """What is known of a trainer before its `fit` is entered for the first time.

    Attributes:
        trainer: the Trainer.
        values: what the user's objects keep, from the end of one entry to the boundary in the next.
        began: how that was when the fit began for the first time, and before its first step.
        places: where it was when the hooks of the last entry's start had run.
        begun: what objects kept beside their state before they were trained (`Unsaved.since`).
    """

    def __init__(self, trainer: Any, model: Any) -> None:
        self.values: UserValues | None = None
        self.began: tuple[Began, Began] | None = None
        self.places = Places()
        self.begun: Any = None
        self.trainer, self._module = trainer, model
        sharded = is_sharded_by(trainer.strategy)
        self._modes, self._parts = KeptModules(model), KeptParts(model) if sharded else None
        self._plain = {name: value for name, value in vars(trainer).items() if isinstance(value, _PLAIN)}
        self._state = vars(trainer.state).copy()
        self._callbacks = list(trainer.callbacks)
        owners = [*filter(is_lightnings, self._callbacks), trainer._logger_connector, trainer._checkpoint_connector]
        self._attributes = [(owner, _copied(vars(owner))) for owner in owners]
        self._loops = _loops(trainer.fit_loop)
        self._replaced = [(one, set(vars(one))) for one in (trainer.strategy, trainer.strategy.precision_plugin)]
        self._forward = vars(model).get("forward")
        options = getattr(trainer.strategy, "kwargs", None)  # of FSDP1, in which a mesh gets there
        self._strategy = {"_device_mesh": None} if options is None else {"kwargs": dict(options)}

    def renew(self, state: UserValues | None) -> None:
        """Between two entries: nothing of the last entry goes on. Where parts are sharded its process groups are
        dropped only afterwards, once the model does not hold them any more.
        """
        self.values = state
        trainer = self.trainer
        trainer.training = True  # else the loop that was active would be left as it is
        trainer._signal_connector._original_handlers.pop(signal.SIGTERM, None)  # somebody else has it meanwhile
        with _without_group():
            trainer._teardown()
            self._tear_down()
        strategy = trainer.strategy
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        strategy._pl_static_graph_delay_done = False
        if (scaler := getattr(strategy.precision_plugin, "scaler", None)) is not None:
            renew_scaler(scaler)
        trainer.callbacks = list(self._callbacks)
        vars(trainer).update(self._plain)
        vars(trainer.state).update(self._state)
        for owner, attributes in (*self._attributes, *self._loops):
            vars(owner).clear()
            vars(owner).update(_copied(attributes))
        self._renew_module()
        if self._parts is not None:
            vars(strategy).update({name: copy.copy(value) for name, value in self._strategy.items()})
            for owner, known in self._replaced:
                _forget_replaced(owner, known)
            self._parts.renew()
        gc.collect()  # runs and optimizers are in cycles, and hold descriptors and memory

    def _tear_down(self) -> None:
        """Call the hooks, as at the end of `fit`: what `setup` has opened is opened again."""
        trainer, module, stage = self.trainer, self._module, self.trainer.state.fn
        if trainer.datamodule is not None:
            _guarded(lambda: trainer.datamodule.teardown(stage=stage))
        for callback in trainer.callbacks:
            _guarded(partial(callback.teardown, trainer, module, stage=stage))
            if isinstance(callback, TQDMProgressBar):
                for bar in filter(None, (vars(callback).get(name) for name in _BARS)):
                    _guarded(bar.close)
        _guarded(lambda: module.teardown(stage=stage))

    def _renew_module(self) -> None:
        module = self._module
        self._modes.renew()
        own = vars(module)
        own.pop("forward", None)  # Lightning's redirection to a step, where DDP has raised before it came to it
        if self._forward is not None:
            own["forward"] = self._forward
        for parameter in module.parameters():
            parameter.grad = None
        module._current_fx_name = None
        module._param_requires_grad_state = {}
        for each in module.modules():
            if isinstance(each, Metric):
                each.reset()


def is_lightnings(callback: Callback) -> bool:
    """It is Lightning's own, or derived from such a one."""
    bases = [base for base in type(callback).__mro__ if base not in (Callback, Checkpoint)]
    return any(base.__module__.startswith("lightning.pytorch.callbacks.") for base in bases)


def _loops(loop: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Each loop, and its attributes."""
    inner = [value for value in vars(loop).values() if isinstance(value, _Loop)]
    return [(loop, _copied(vars(loop))), *(row for one in inner for row in _loops(one))]


_PLAIN = (bool, int, float, str, type(None))


def _copied(value: Any) -> Any:
    """Another one for what changes in place; all else is the same object."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, _BaseProgress):
        return copy.deepcopy(value)
    if type(value) is _ResultCollection:
        return _ResultCollection(value.training)
    if isinstance(value, dict):
        found = copy.copy(value)
        for key, item in value.items():
            found[key] = _copied(item)
        return found
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


@contextmanager
def _without_group() -> Iterator[None]:
    """What hooks find is no process group, even if it is not gone yet: a collective of theirs could wait for ever."""
    members: Any = distributed_c10d.GroupMember
    there, members.WORLD = members.WORLD, None
    try:
        yield
    finally:
        members.WORLD = there


def _forget_replaced(owner: Any, known: set[str]) -> None:
    """Methods that were replaced on this object since, and whose undo came in the wrong order: they hold the model."""
    for name in vars(owner).keys() - known:
        if callable(getattr(type(owner), name, None)):
            delattr(owner, name)


def _guarded(hook: Callable[[], object]) -> None:
    try:
        hook()
    except Exception:  # the user's; the training goes on without what it would have closed
        log.exception("a teardown hook raised while the fit was about to be entered again")
