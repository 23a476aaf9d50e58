"""State that modules keep beside parameters and buffers (`get_extra_state`), captured at the end of each step.

It may change in the middle of a step (a counter in `forward`), so its value at a fault belongs to no step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX


class ExtraStates:
    """Those of a module and all below it, as they are found there now."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = {
            f"{prefix}.{_EXTRA_STATE_KEY_SUFFIX}" if prefix else _EXTRA_STATE_KEY_SUFFIX: child
            for prefix, child in module.named_modules()
            if type(child).get_extra_state is not nn.Module.get_extra_state
        }

    def take(self) -> dict[str, Any]:
        """Copies of their current values, by key in `state_dict`."""
        return {key: copy.deepcopy(child.get_extra_state()) for key, child in self._modules.items()}

    def restore(self, taken: Mapping[str, Any]) -> None:
        """Give the modules what `take` has returned."""
        for key, value in taken.items():
            self._modules[key].set_extra_state(copy.deepcopy(value))


def put(states: dict[str, Any], taken: Mapping[str, Any], prefix: str = "") -> None:
    """Put what `ExtraStates.take` has returned into a `state_dict`, whose keys lack `prefix`."""
    states.update({key: value for name, value in taken.items() if (key := _behind(name, prefix)) in states})


def _behind(name: str, prefix: str) -> str:
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


