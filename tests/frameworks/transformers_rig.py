"""A tiny Trainer on one device in this process, and what breaks it; used by several test modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from lastgasp import fits
from lastgasp.testing.faults import InjectedFault
from support.train_transformers import Tokens, arguments, model, result


class Breaks(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Raises once, in the step after `after`."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Raise."""
        if state.global_step == self._after:
            self._after = -1
            raise InjectedFault("broken")


def trainer(
    folder: Path, *callbacks: Any, rows: int = 12, net: Any = None, kind: type[Trainer] = Trainer, **changed: Any
) -> Trainer:
    """Twelve steps, saved every four."""
    wanted = arguments(str(folder), "plain")
    for name, value in changed.items():
        setattr(wanted, name, value)
    return kind(net or model(), wanted, train_dataset=Tokens(rows, True), eval_dataset=Tokens(8),
                callbacks=[*callbacks])  # fmt: skip


def outcome(one: Trainer, loss: float) -> dict[str, torch.Tensor]:
    """What two runs of one training have in common."""
    return {name: value.clone() for name, value in result(one, loss).items()}


def new_process() -> None:
    """What trains next is the first training of its script, as in a new process."""
    fits.FITS._last.clear()
