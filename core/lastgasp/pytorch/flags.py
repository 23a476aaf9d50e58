"""Which parameters are trained, and which modules evaluate: scripts change both in the middle of training.

No `state_dict` has it. A script that unfreezes layers in epoch 3 does not do so again when it is resumed in epoch 4.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import nn

log = logging.getLogger("lastgasp")

_TRAINED, _MODE = attrgetter("requires_grad"), attrgetter("training")


class Flags:
    """Those of one module and all below it, as they are found there now.

    Args:
        module: whose parameters and modules count; what is added to it later does not.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters, modules = dict(module.named_parameters()), dict(module.named_modules())
        self._parameters, self._modules = list(parameters.values()), list(modules.values())
        self._names = list(parameters), list(modules)

    def take(self) -> tuple[bytes, bytes]:
        """As they stand: one byte each. Some 30 ns for each of them."""
        return bytes(map(_TRAINED, self._parameters)), bytes(map(_MODE, self._modules))

    def record(self, taken: tuple[bytes, bytes]) -> dict[str, list[str]]:
        """What goes into a checkpoint: names of the parameters that are frozen, and of modules that evaluate."""
        frozen, evaluating = (
            [name for name, on in zip(names, row, strict=True) if not on]
            for names, row in zip(self._names, taken, strict=True)
        )
        return {"frozen": frozen, "evaluating": evaluating}

    def restore(self, record: Mapping[str, Any] | None, tell: bool = True) -> None:
        """Have them be as recorded; None leaves them alone.

        Args:
            tell: log what has changed by it.
        """
        if record is None:
            return
        frozen, evaluating = set(record["frozen"]), set(record["evaluating"])
        changed = []
        for name, parameter in zip(self._names[0], self._parameters, strict=True):
            if parameter.requires_grad != (name not in frozen):
                parameter.requires_grad_(name not in frozen)
                changed.append(f"{name} is {'frozen' if name in frozen else 'trained'}")
        for name, module in zip(self._names[1], self._modules, strict=True):
            if module.training != (name not in evaluating):
                module.training = name not in evaluating
                changed.append(f"{name or 'the model'} is in {'training' if module.training else 'evaluation'} mode")
        if changed and tell and os.environ.get("RANK", "0") == "0":
            what = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
            log.warning("as when the checkpoint was saved, not as the script has set it: %s", what)
