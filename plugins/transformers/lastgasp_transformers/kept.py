"""How a Trainer is before `train`: what is entered again begins with it so, as a new process would."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn

from lastgasp.adapter.again import ONCE, KeptModules, Root, UserValues, is_users, renew_scaler
from lastgasp.adapter.torch import rng
from lastgasp_transformers.values import is_others, roots_beside, roots_of, roots_of_configs

_CONTAINERS, _PLAIN = (list, dict, set, deque), (int, float, str, tuple, torch.Tensor, type(None))
_NEW = vars(nn.Module())
_HOOKS = tuple(name for name in _NEW if "hooks" in name and isinstance(_NEW[name], dict))


class KeptTrainer:
    """Note it; `reset` makes it so again, but for weights and buffers, which are the checkpoint's.

    Attributes:
        values: what objects of the user's classes keep in plain Python. Ranks that decide by them must agree, and a
            new process begins with none.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        handler = trainer.callback_handler
        owners = (trainer, trainer.args, handler, trainer.control)
        self._attributes = [(owner, dict(vars(owner))) for owner in owners]
        self._callbacks = list(handler.callbacks)
        self._model = KeptModel(trainer.model) if trainer.model is not None else None
        beside = [root.value for root in roots_beside(trainer, roots_of(trainer))]
        self._beside = [(one._modules, dict(one._modules)) for one in beside]  # the model in DDP, in that of a loss
        self._random = rng.RngRecorder([trainer.args.device]).snapshot()
        self.values = _values_of(trainer)

    def reset(self) -> None:
        """Only `values` are left to the caller."""
        trainer = self._trainer
        trainer.accelerator.free_memory()
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            renew_scaler(scaler)
        GradientState().dataloader_references = [None]  # those that were being read, of which none comes to its end
        for owner, values in self._attributes:
            vars(owner).clear()
            vars(owner).update(values)
        for now, before in self._beside:
            now.clear()
            now.update(before)
        trainer.callback_handler.callbacks = list(self._callbacks)
        if self._model is not None:
            self._model.renew()
        rng.restore(rng.decode(self._random))


class KeptModel:
    """The modules of a model: their hooks (NEFTune's would add its noise twice), attributes and modes.

    It does not keep them alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modes = KeptModules(model)
        self._parts = [(weakref.ref(one), *_own(one)) for one in model.modules()]

    def renew(self) -> None:
        """Have them again, without gradients. What was added since is taken away: accelerate's `forward`, for one."""
        for found, attributes, hooks in self._parts:
            if (module := found()) is None:
                continue
            own = vars(module)
            for name in own.keys() - _NEW.keys() - attributes.keys():
                del own[name]
            own.update(attributes)
            for name, registered in hooks.items():
                own[name].clear()
                own[name].update(registered)
        self._modes.renew()


def _own(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[int, Callable[..., Any]]]]:
    own = vars(module)
    hooks = {name: dict(own[name]) for name in _HOOKS if own.get(name) is not None}
    return {name: value for name, value in own.items() if name not in _NEW}, hooks


def _values_of(trainer: Any) -> UserValues:
    """Of callbacks and a subclass of Trainer, a package's too, and of parts of the model where they are the user's."""
    callbacks = [one for one in trainer.callback_handler.callbacks if is_others(type(one))]
    roots = [Root(type(one).__name__, one, frozenset() if is_users(type(one)) else _of_package(one))
             for one in callbacks]  # fmt: skip
    modules = [] if trainer.model is None else list(trainer.model.modules())
    roots += [Root(type(one).__name__, one, frozenset(_NEW)) for one in modules if is_users(type(one))]
    if is_others(type(trainer)):
        roots.append(Root(type(trainer).__name__, trainer, _of_trainer(trainer)))
    roots = roots_beside(trainer, roots_of(trainer)) + roots + roots_of_configs(trainer.model)
    tensors = [one for module in modules for one in (*module.parameters(False), *module.buffers(False))]
    values = UserValues(roots, [*modules, *tensors], ONCE)
    values.take()
    if values.big:  # is known by its content from the second look on
        values.take()
    return values


def _of_trainer(trainer: Any) -> frozenset[str]:
    """Attributes in which nothing of a subclass's can be; which of them there are is kept by `KeptTrainer` itself."""
    own = vars(trainer).items()
    return frozenset(name for name, v in own if not isinstance(v, _CONTAINERS) and not is_users(type(v)))


def _of_package(callback: Any) -> frozenset[str]:
    """Attributes of a callback of an installed package that are more than plain values."""
    return frozenset(name for name, v in vars(callback).items() if not isinstance(v, (*_CONTAINERS, *_PLAIN)))
