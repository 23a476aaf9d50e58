"""What the script sets of optimizers, schedulers and torch's own modules, and set when a checkpoint's job began.

Of optimizers and schedulers a resume takes the checkpoint's values: a learning rate that was changed between two
starts, or a schedule that was made longer, has no effect. That is what `load_state_dict` does; somebody who has not
called it should be told. Modules keep what the script sets, such as another share of dropout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lastgasp.errors import CheckpointMismatch
from lastgasp.pytorch.owncopy import own_copy

Values = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_SHOWN = 4
_MODULES = 5000
"""Settings of so many modules are compared; those of larger models are not."""


class AsSet:
    """Taken when the training begins, before anything is loaded.

    Args:
        optimizers, schedulers: the user's, by what they are called.
        where: where the script can set new values that last.
        module: settings of torch's modules in it count (the share of dropout).

    Attributes:
        values: what goes into a checkpoint.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Any],
        schedulers: Mapping[str, Any],
        where: str = "once the checkpoint is loaded",
        module: nn.Module | None = None,
    ) -> None:
        self._modules = dict(_of_modules(module))
        self.values: Values = dict(self._modules)
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
        changed = {name: value for name, value in self.values.items() if name in stored and stored[name] != value}
        rows = [f"{name} is {stored[name]!r} (the script: {value!r})" for name, value in changed.items()]
        if changed and trial is not None:
            raise CheckpointMismatch(str(trial), [f"{row}: it may be of another trial" for row in rows])
        if changed and os.environ.get("RANK", "0") == "0":
            self._tell([row for row, name in zip(rows, changed, strict=True) if name not in self._modules], note)
            others = [row for row, name in zip(rows, changed, strict=True) if name in self._modules]
            if others:
                note(f"when the job of the checkpoint began, {_some(others)}. Training goes on with the script's")

    def _tell(self, rows: list[str], note: Callable[[str], object]) -> None:
        if rows:
            note(f"as when the job of the checkpoint began, not as the script sets it: {_some(rows)}. To train on with "
                 f"new values, set them {self._where}")  # fmt: skip


def _some(rows: list[str]) -> str:
    return "; ".join(rows[:_SHOWN]) + (f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else "")


def _of_modules(module: nn.Module | None) -> Iterable[tuple[str, Any]]:
    found = list(module.named_modules()) if module is not None else []
    for place, one in found if len(found) <= _MODULES else ():
        yield from ((f"{name} of {place}", value) for name, value in settings_of(one).items())


def settings_of(module: nn.Module) -> dict[str, float]:
    """Those of one of torch's own modules that are no sizes: the share of dropout, the momentum of a norm."""
    if not type(module).__module__.startswith("torch.nn."):
        return {}
    known = {name: vars(module).get(name) for name in (*getattr(type(module), "__constants__", ()), "dropout")}
    return {name: value for name, value in known.items() if type(value) is float}


def _plain(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        row = value if isinstance(value, list | tuple) else [value]
        if not name.startswith("_") and name != "params" and all(isinstance(one, _PLAIN) for one in row):
            yield name, own_copy(value)
