"""Which parameters are trained, and which modules evaluate: scripts change both in the middle of training.

No `state_dict` has it. A script that unfreezes layers in epoch 3 does not do so again when it is resumed in epoch 4.
The same of whether norms follow their running statistics, which Lightning's BaseFinetuning sets as it (un)freezes them.
The same of which parameters have a gradient, though it be zeros: an optimizer changes these alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from operator import truth
from typing import Any

import torch
from torch import nn

from lastgasp.pytorch.compiled import truths_of

log = logging.getLogger("lastgasp")


class Flags:
    """Those of one module and all below it, as they are found there now.

    Args:
        module: whose parameters and modules count; what is added to it later does not.
        gradients: have gradients counted. `take` has them where steps find some before they begin (`look`): what a
            step leaves may be set to None behind its end.
    """

    def __init__(self, module: nn.Module, gradients: bool = False) -> None:
        parameters, modules = dict(module.named_parameters()), dict(module.named_modules())
        self._parameters, self._modules = list(parameters.values()), list(modules.values())
        self._norms = {name: one for name, one in modules.items() if hasattr(one, "track_running_stats")}
        self._tracking, self._truths = list(self._norms.values()), truths_of()
        self._names, self._gradients, self._found = (list(parameters), list(modules)), gradients, False
        self._none = bytes(len(self._parameters))

    def take(self) -> tuple[bytes, bytes, bytes]:
        """As they stand: one byte each, those of norms behind those of modules. Some 30 ns each, 80 ns for a gradient.

        No gradients where the last step has found none, since then the next one will not either.
        """
        graded, truths = self.graded() if self._found else self._none, self._truths
        modes = truths(self._modules, "training")
        if self._tracking:
            modes += truths(self._tracking, "track_running_stats")
        return truths(self._parameters, "requires_grad"), modes, graded

    def look(self) -> bytes:
        """A step begins: which parameters have a gradient now."""
        graded = self.graded()
        self._found = any(graded)
        return graded

    def graded(self) -> bytes:
        """Which parameters have a gradient now; none where these do not count."""
        strided = torch.strided  # zeros in the place of a sparse one would be dense
        asked = self._parameters if self._gradients else ()
        return bytes((g := p.grad) is not None and g.layout is strided for p in asked)

    def record(self, taken: tuple[bytes, bytes, bytes]) -> dict[str, list[str]]:
        """What goes into a checkpoint: names of parameters that are frozen, of those with gradients, and of modules."""
        count = len(self._modules)
        rows = (self._names[0], taken[0]), (self._names[1], taken[1][:count]), (list(self._norms), taken[1][count:])
        frozen, evaluating, untracked = ([name for name, on in zip(*row, strict=True) if not on] for row in rows)
        graded = [name for name, on in zip(self._names[0], taken[2], strict=False) if on]
        return {"frozen": frozen, "evaluating": evaluating, "graded": graded, "untracked": untracked}

    def restore(self, record: Mapping[str, Any] | None, tell: bool = True) -> None:
        """Have them be as recorded; None leaves them alone. Gradients that are missing become zeros.

        Args:
            tell: log what has changed by it; not that all modules are in the other mode, which loops set by themselves.
        """
        if record is None:
            return
        frozen, evaluating = set(record["frozen"]), set(record["evaluating"])
        graded = set(record.get("graded", ()))
        changed = []
        for name, parameter in zip(self._names[0], self._parameters, strict=True):
            if name in graded and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            if parameter.requires_grad != (name not in frozen):
                parameter.requires_grad_(name not in frozen)
                changed.append(f"{name} is {'frozen' if name in frozen else 'trained'}")
        below = [(name, module.training) for name, module in zip(self._names[1], self._modules, strict=True) if name]
        whole = len({on for _, on in below}) == len({name in evaluating for name, _ in below}) == 1
        for name, module in zip(self._names[1], self._modules, strict=True):
            if module.training != (name not in evaluating):
                module.training = name not in evaluating
                mode = "training" if module.training else "evaluation"
                changed += [] if whole else [f"{name or 'the model'} is in {mode} mode"]
        for name, one in self._norms.items() if "untracked" in record else ():
            if truth(one.track_running_stats) != (name not in record["untracked"]):
                one.track_running_stats = name not in record["untracked"]
                does = "follows" if one.track_running_stats else "does not follow"
                changed.append(f"{name or 'the model'} {does} running statistics")
        if changed and tell and os.environ.get("RANK", "0") == "0":
            what = "; ".join(changed[:3]) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
            log.warning("as when the checkpoint was saved, not as the script has set it: %s", what)
