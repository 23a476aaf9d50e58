"""What the script sets of optimizers and schedulers: a resume takes the checkpoint's values, whatever it sets now.

A learning rate that was changed between two starts, or a schedule that was made longer, has no effect then. That is
what `load_state_dict` does; somebody who has not called it should be told.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

log = logging.getLogger("lastgasp")

Values = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_SHOWN = 4


class AsSet:
    """Taken when the training begins, before anything is loaded.

    Args:
        optimizers, schedulers: the user's, by what they are called.

    Attributes:
        values: what goes into a checkpoint.
    """

    def __init__(self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any]) -> None:
        self.values: Values = {}
        for label, optimizer in optimizers.items():
            groups = optimizer.param_groups
            for number, group in enumerate(groups):
                where = label if len(groups) == 1 else f"{label}, group {number}"
                self.values |= {f"{name} of {where}": value for name, value in _plain(group)}
        for label, scheduler in schedulers.items():
            state: Mapping[str, Any] = getattr(scheduler, "state_dict", dict)()
            self.values |= {f"{name} of {label}": value for name, value in _plain(state)}

    def tell(self, stored: object) -> None:
        """Log what was set otherwise when the job of a checkpoint began, on rank 0.

        Args:
            stored: `values` of that checkpoint; anything else (that of an earlier version) is left alone.
        """
        if not isinstance(stored, dict) or os.environ.get("RANK", "0") != "0":
            return
        changed = [
            f"{name} is {stored[name]!r} (the script: {value!r})"
            for name, value in self.values.items()
            if name in stored and stored[name] != value
        ]
        if changed:
            what = "; ".join(changed[:_SHOWN])
            more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            log.warning("as when the job of the checkpoint began, not as the script sets it: %s%s. To train on with "
                        "new values, set them once the session is open", what, more)  # fmt: skip


def _plain(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        row = value if isinstance(value, list | tuple) else [value]
        if not name.startswith("_") and name != "params" and all(isinstance(one, _PLAIN) for one in row):
            yield name, value
