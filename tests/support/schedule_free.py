"""A stand-in for schedule-free optimizers."""

from __future__ import annotations

from typing import Any

import torch


class Averages(torch.optim.Optimizer):
    """As a schedule-free one: `eval` puts other weights into the model, `train` takes them out."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "train_mode": True})

    def _swap(self, mode: bool) -> None:
        for group in self.param_groups:
            for one in group["params"] if group["train_mode"] != mode else ():
                if (other := self.state[one].get("other")) is not None:
                    kept = one.detach().clone()
                    one.data.copy_(other)
                    other.copy_(kept)
            group["train_mode"] = mode

    def train(self) -> None:
        """To be called before a step."""
        self._swap(True)

    def eval(self) -> None:
        """To be called before a validation."""
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Of the weights, and of their average."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad, alpha=-group["lr"])
                self.state[one].setdefault("other", one.detach().clone()).lerp_(one, 0.3)
        return loss
