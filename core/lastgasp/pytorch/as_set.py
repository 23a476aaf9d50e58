"""What the script sets of optimizers and schedulers: a resume takes the checkpoint's values, whatever it sets now.

A learning rate that was changed between two starts, or a schedule that was made longer, has no effect then. That is
what `load_state_dict` does; somebody who has not called it should be told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lastgasp.errors import CheckpointMismatch
from lastgasp.pytorch.owncopy import own_copy

Values = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_SHOWN = 4


class AsSet:
    """Taken when the training begins, before anything is loaded.

    Args:
        optimizers, schedulers: the user's, by what they are called.
        where: where the script can set new values that last.

    Attributes:
        values: what goes into a checkpoint.
    """

    def __init__(
        self, optimizers: Mapping[str, Any], schedulers: Mapping[str, Any], where: str = "once the checkpoint is loaded"
    ) -> None:
        self.values: Values = {}
        self._where = where
        for label, optimizer in optimizers.items():
            groups = optimizer.param_groups
            for number, group in enumerate(groups):
                where = label if len(groups) == 1 else f"{label}, group {number}"
                self.values |= {f"{name} of {where}": value for name, value in _plain(group)}
        for label, scheduler in schedulers.items():
            state: Mapping[str, Any] = getattr(scheduler, "state_dict", dict)()
            self.values |= {f"{name} of {label}": value for name, value in _plain(state)}

    def tell(self, stored: object, note: Callable[[str], object], trial: Path | None = None) -> None:
        """Report what was set otherwise when the job of a checkpoint began, on rank 0.

        Args:
            stored: `values` of that checkpoint; anything else (that of an earlier version) is left alone.
            note: gets it, for log and incident (`Session.note`).
            trial: the checkpoint, where its directory has those of several trainings of one script: other settings
                are those of another trial then.

        Raises:
            CheckpointMismatch: it may be another trial's.
        """
        if not isinstance(stored, dict):
            return
        changed = [
            f"{name} is {stored[name]!r} (the script: {value!r})"
            for name, value in self.values.items()
            if name in stored and stored[name] != value
        ]
        if changed and trial is not None:
            raise CheckpointMismatch(str(trial), [f"{line}: it may be of another trial" for line in changed])
        if changed and os.environ.get("RANK", "0") == "0":
            what = "; ".join(changed[:_SHOWN])
            more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            note(f"as when the job of the checkpoint began, not as the script sets it: {what}{more}. To train on with "
                 f"new values, set them {self._where}")  # fmt: skip


def _plain(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        row = value if isinstance(value, list | tuple) else [value]
        if not name.startswith("_") and name != "params" and all(isinstance(one, _PLAIN) for one in row):
            yield name, own_copy(value)
