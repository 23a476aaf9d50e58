"""What changes in the middle of a step, so that its value at a fault belongs to no step. Captured at each boundary.

The state of a datamodule, and of modules with `get_extra_state` (a counter in `training_step`); parameters that change
before the update (momentum encoders).
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import nn

from lastgasp.adapter.torch import MovingParameters, extrastate

log = logging.getLogger("lastgasp")


Taken = tuple[Any, dict[str, Any], int]


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
        self.moving = MovingParameters(nn.Module() if sharded else trainer.lightning_module, log.warning)

    def take(self, step: int) -> Taken:
        """Copies of their current values: the datamodule's, and by key in `state_dict` the modules'; and the step.

        The modules' are left out where it is not this step's turn (`missing`).
        """
        data = copy.deepcopy(self._data.state_dict()) if self._data is not None else None
        self.moving.closes(step)
        return data, self._modules.step_over(step), step

    def missing(self, taken: Taken, exchanged: bool) -> str:
        """What to note on a checkpoint that has only `taken` of the boundary; empty where that is all.

        Args:
            exchanged: parameters are others at the moment, and are known to be.
        """
        moved = "" if exchanged else self.moving.missing(taken[2])
        return "; ".join(filter(None, (self._modules.missing(taken[1]), moved)))

    def put(self, checkpoint: dict[str, Any], taken: Taken, exchanged: bool) -> None:
        """Put what `take` returned into a checkpoint of Lightning's; `exchanged`: its parameters are to stay."""
        data, modules, step = taken
        if not exchanged:
            extrastate.put(checkpoint.get("current_model_state", checkpoint["state_dict"]), self.moving.held(step))
        if data is not None:
            checkpoint[type(self._data).__qualname__] = data
        for states in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
            extrastate.put(states, modules)
