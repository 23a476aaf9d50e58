"""All buffers of a fit that belong in its checkpoint: the module's, and those of averaged models of callbacks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from torch import nn

_AVERAGE = "lastgasp_average"


def with_averages(trainer: Any) -> nn.Module:
    """The module, or a container of it and of averaged models of callbacks, under names with lastgasp's prefix."""
    module: nn.Module = trainer.lightning_module
    kept = [getattr(cb, "_average_model", None) for cb in trainer.callbacks if isinstance(cb, WeightAveraging)]
    averages = [average.module for average in kept if average is not None]
    if not averages:
        return module
    both = nn.Module()
    both._modules[""] = module  # set directly: its buffers keep their names only under an empty name
    both._modules.update({f"{_AVERAGE}{number}": average for number, average in enumerate(averages)})
    return both
