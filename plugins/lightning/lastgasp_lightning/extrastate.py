"""The user's own state beside weights: of a datamodule, of modules with `get_extra_state`. Captured at each boundary.

Both may change in the middle of a step (a counter in `training_step`), so their values at a fault belong to no step.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import LightningDataModule

from lastgasp.adapter.torch import extrastate


class ExtraStates:
    """Of one fit; made in `on_fit_start`.

    Args:
        sharded: the modules' states are those of the shards.
    """

    def __init__(self, trainer: Any, sharded: bool) -> None:
        data = trainer.datamodule
        own = data is not None and type(data).state_dict is not LightningDataModule.state_dict
        self._data = data if own else None
        self._modules = extrastate.ExtraStates({} if sharded else trainer.lightning_module)

    def take(self, step: int) -> tuple[Any, dict[str, Any]]:
        """Copies of their current values: the datamodule's, and by key in `state_dict` the modules'.

        The modules' are left out where it is not this step's turn (`missing`).
        """
        data = copy.deepcopy(self._data.state_dict()) if self._data is not None else None
        return data, self._modules.step_over(step)

    def missing(self, taken: tuple[Any, dict[str, Any]]) -> str:
        """What to note on a checkpoint that has only `taken` of the boundary; empty where that is all."""
        return self._modules.missing(taken[1])

    def put(self, checkpoint: dict[str, Any], taken: tuple[Any, dict[str, Any]]) -> None:
        """Put what `take` returned into a checkpoint of Lightning's."""
        data, modules = taken
        if data is not None:
            checkpoint[type(self._data).__qualname__] = data
        for states in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
            extrastate.put(states, modules)
