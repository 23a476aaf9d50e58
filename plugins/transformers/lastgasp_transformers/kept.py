"""How a Trainer is before `train`: what is entered again begins with it so, as a new process would."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from accelerate.state import GradientState
from torch import nn
from transformers.trainer_callback import ExportableState

from lastgasp.adapter.again import ONCE, KeptModules, Root, UserValues, is_users, renew_scaler
from lastgasp.adapter.torch import Unsaved, rng, users_parts

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
    """Of callbacks, of the Trainer and of parts of the model, where their classes are the user's."""
    callbacks = [one for one in trainer.callback_handler.callbacks if is_users(type(one))]
    roots = [Root(type(one).__name__, one) for one in callbacks]
    modules = [] if trainer.model is None else list(trainer.model.modules())
    roots += [Root(type(one).__name__, one, frozenset(_NEW)) for one in modules if is_users(type(one))]
    if is_users(type(trainer)):
        roots.append(Root(type(trainer).__name__, trainer, _of_trainer(trainer)))
    tensors = [one for module in modules for one in (*module.parameters(False), *module.buffers(False))]
    values = UserValues(roots, [*modules, *tensors], ONCE)
    values.take()
    if values.big:  # is known by its content from the second look on
        values.take()
    return values


def unsaved_of(trainer: Any) -> Unsaved:
    """What no checkpoint has of callbacks that are no `ExportableState`, of a subclass of Trainer, and of modules."""
    callbacks = [one for one in trainer.callback_handler.callbacks if not isinstance(one, ExportableState)]
    roots = [Root(type(one).__name__, one) for one in callbacks]
    roots.append(Root(type(trainer).__name__, trainer, _names_in(type(trainer))))
    roots += users_parts(trainer.model)
    return Unsaved(trainer.model, roots, "get_extra_state of modules, or state of an ExportableState,")


def _names_in(cls: type) -> frozenset[str]:
    """Attributes that code of Trainer's own names: none of them is a subclass's."""
    theirs = [one for base in cls.__mro__ if not is_users(base) for one in vars(base).values()]
    functions = [inspect.unwrap(one) for one in theirs if isinstance(one, FunctionType)]
    return frozenset(name for one in functions for name in one.__code__.co_names)


def _of_trainer(trainer: Any) -> frozenset[str]:
    """Attributes in which nothing of the user's can be."""
    theirs = (list, dict, set)
    return frozenset(name for name, v in vars(trainer).items() if not (isinstance(v, theirs) or is_users(type(v))))
