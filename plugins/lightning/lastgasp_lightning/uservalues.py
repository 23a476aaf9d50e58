"""What a user's module, callbacks and datamodule keep in plain Python, beside what checkpoints have."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric

from lastgasp.adapter.again import Root, UserValues, is_users
from lastgasp.adapter.torch import Unsaved, extrastate
from lastgasp_lightning.enters import Enters
from lastgasp_lightning.kept import is_lightnings
from lastgasp_lightning.unsharded import of_sharding, own_class

_HPARAMS = ("_hparams", "_hparams_name", "_hparams_initial", "_log_hyperparams")


def values_of(trainer: Any) -> UserValues:
    """Those of a trainer in `fit`, once its model is there."""
    return UserValues(roots_of(trainer), known_of(trainer))


def known_of(trainer: Any) -> list[object]:
    """What is restored by itself."""
    module = trainer.lightning_module
    return [*module.modules(), *module.parameters(), *module.buffers()]


class ValuesOfSteps:
    """Those of the last steps.

    Args:
        trainer: in `fit`, once its model is there.
        steps: of how many; a rank that holds a part of the state alone may have to go back by one.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        self._kept = [values_of(trainer) for _ in range(steps)]
        self._steps = [-1] * steps
        self._newest = self._kept[0]

    def take(self, step: int) -> None:
        """Record everything as it stands at the end of `step`. Never raises."""
        place = step % len(self._kept)
        self._newest, self._steps[place] = self._kept[place], step
        self._newest.take()

    def verify(self) -> None:
        """As `UserValues.verify`."""
        self._newest.verify()

    def cannot(self) -> str:
        """As `UserValues.cannot`, of the newest step."""
        return self._newest.cannot()

    def of(self, step: int) -> UserValues | None:
        """Those of that step, if it is one of the last."""
        return next((one for one, at in zip(self._kept, self._steps, strict=True) if at == step), None)


def roots_of(trainer: Any) -> list[Root]:
    """Where they are found: the same names on all ranks."""
    module, data = trainer.lightning_module, trainer.datamodule
    name = own_class(module).__name__
    found = [Root(name, module, _of_module() | of_sharding(module))]
    found += [Root(f"{name}.{path}", one, _of_part() | of_sharding(one)) for path, one in _parts(module)]
    if data is not None:
        found.append(Root(type(data).__name__, data, _of_data()))
    callbacks = [one for one in trainer.callbacks if not isinstance(one, Enters) and not is_lightnings(one)]
    for place, one in enumerate(callbacks):
        number = f" {place}" if sum(type(other) is type(one) for other in callbacks) > 1 else ""
        found.append(Root(type(one).__name__ + number, one, _of_callback(one)))
    return [root for root in found if not type(root.value).__module__.startswith("lastgasp")]


def unsaved_of(trainer: Any) -> Unsaved:
    """What of them no checkpoint has: that of objects without methods of their own that save it."""
    roots = [root for root in roots_of(trainer) if not _saves(root.value)] + list(_derived(trainer))
    return Unsaved(trainer.lightning_module, roots, "get_extra_state of modules, or state_dict of callbacks,")


_STUDY = (
    "Optuna's study is in no checkpoint: in a process that begins anew, the trial has reported only the epochs from "
    "there on, and pruning may decide otherwise"
)


def unsaved_study(trainer: Any) -> str:
    """What to note of Optuna's pruning callbacks, which report to the study of the process; empty without one."""
    modules = {base.__module__.partition(".")[0] for one in trainer.callbacks for base in type(one).__mro__}
    return _STUDY if modules & {"optuna", "optuna_integration"} else ""


def unsaved_roots(trainer: Any) -> list[Root]:
    """Those of objects without methods of their own that save them, as the end of a step has them.

    Not of Checkpoints of the user's: their hooks run when that is recorded already. Nor of several callbacks of one
    class, of which a restart that has others cannot tell which is which.
    """
    several = Counter(map(type, trainer.callbacks))
    return [root for root in roots_of(trainer)
            if not (_saves(one := root.value) or isinstance(one, Checkpoint) or several[type(one)] > 1)]  # fmt: skip


def _derived(trainer: Any) -> Iterator[Root]:
    """What classes of the user's add to callbacks of Lightning's, and do not save: it is only named."""
    for one in filter(is_lightnings, trainer.callbacks):
        bases = type(one).__mro__
        own = [vars(base) for base in bases if is_users(base)]
        if own and not any(name in methods for methods in own for name in ("state_dict", "on_save_checkpoint")):
            theirs = [f for base in bases if not is_users(base) for f in vars(base).values()]
            code = [inspect.unwrap(f).__code__ for f in theirs if isinstance(f, FunctionType)]
            yield Root(type(one).__name__, one, frozenset(name for each in code for name in each.co_names))


def _saves(value: Any) -> bool:
    if isinstance(value, nn.Module):
        own = isinstance(value, LightningModule) and is_overridden("on_save_checkpoint", value)
        return own or extrastate.has_extra_state(value)
    base = LightningDataModule if isinstance(value, LightningDataModule) else Callback
    return any(is_overridden(name, value, base) for name in ("state_dict", "on_save_checkpoint"))


def _parts(module: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, one in module.named_modules():
        if name and is_users(own_class(one)) and not isinstance(one, Metric):
            yield name, one


@functools.cache
def _of_part() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


@functools.cache
def _of_module() -> frozenset[str]:
    return frozenset((*vars(LightningModule()), *_HPARAMS))


def _of_callback(callback: Callback) -> frozenset[str]:
    """LightningCLI's callback has its configuration from the start, and no step changes that."""
    cli: Any = sys.modules.get("lightning.pytorch.cli")
    of_cli = cli is not None and isinstance(callback, cli.SaveConfigCallback)
    return frozenset(("parser", "config", "already_saved") if of_cli else ())


@functools.cache
def _of_data() -> frozenset[str]:
    return frozenset((*vars(LightningDataModule()), *_HPARAMS))
