"""The user's own state beside weights: of a datamodule, of modules with `get_extra_state`. Captured at each boundary.

Both may change in the middle of a step (a counter in `training_step`), so their values at a fault belong to no step.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX


class ExtraStates:
    """Of one fit; made in `on_fit_start`."""

    def __init__(self, trainer: Any) -> None:
        data, module = trainer.datamodule, trainer.lightning_module
        own = data is not None and type(data).state_dict is not LightningDataModule.state_dict
        self._data = data if own else None
        self._modules = {
            f"{prefix}.{_EXTRA_STATE_KEY_SUFFIX}" if prefix else _EXTRA_STATE_KEY_SUFFIX: child
            for prefix, child in module.named_modules()
            if type(child).get_extra_state is not nn.Module.get_extra_state
        }

    def take(self) -> tuple[Any, dict[str, Any]]:
        """Copies of their current values: the datamodule's, and by key in `state_dict` the modules'."""
        if self._data is None and not self._modules:
            return None, {}
        data = copy.deepcopy(self._data.state_dict()) if self._data is not None else None
        return data, {key: copy.deepcopy(child.get_extra_state()) for key, child in self._modules.items()}

    def put(self, checkpoint: dict[str, Any], taken: tuple[Any, dict[str, Any]]) -> None:
        """Put what `take` returned into a checkpoint of Lightning's."""
        data, modules = taken
        if data is not None:
            checkpoint[type(self._data).__qualname__] = data
        for states in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
            states.update({key: value for key, value in modules.items() if key in states})
