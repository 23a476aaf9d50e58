"""Which weights a schedule-free optimizer has put into the model: those that are trained, or their average.

It exchanges them in its `train` and `eval`, and says in each group which ones they are. That goes with the weights of a
checkpoint, not with the boundary that the rest of it is brought to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_WHICH = "train_mode"
EXCHANGED = "an optimizer has exchanged the weights while they were written (its train() or eval())"
"""Why what was written cannot be published."""


def which_weights(groups: Iterable[Iterable[Mapping[str, Any]]]) -> list[Any]:
    """Which ones are in the model, for each group of each optimizer; None where there are no others."""
    return [group.get(_WHICH) for one in groups for group in one]


def patch_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put hyperparameters into a group, but not which weights are in the model."""
    group.update({name: value for name, value in values.items() if name != _WHICH or name not in group})
