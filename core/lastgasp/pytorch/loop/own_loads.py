"""A script that loads checkpoints of its own beside a session: nothing newer is replaced, and nothing mixed, unseen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastgasp.errors import ConfigError
from lastgasp.pytorch.loop.outside import some_values
from lastgasp.pytorch.loop.state import TorchState


class OwnLoads:
    """What the script loads itself, before a session resumes and after.

    Args:
        state: the user's, before anything is loaded into it; note: reports what people must know (`Session.note`).
    """

    def __init__(self, state: TorchState, note: Callable[[str], object]) -> None:
        self._state, self._note = state, note
        self._before = _updates(state) | _epochs(state)
        self._path: Path | None = None
        self._held: tuple[Mapping[str, int], list[Tensor], list[Any]] = {}, [], []

    def require_older(self, path: Path, restarted: bool) -> None:
        """`path` was loaded.

        Args:
            restarted: nobody is there to change the script; a refusal would end the job.

        Raises:
            ConfigError: what the script had loaded before is newer, and somebody has just started the job.
        """
        now = _updates(self._state) | _epochs(self._state)
        for name, before in self._before.items():
            if before <= max(now[name], 1):  # 1: an update by which torch makes an optimizer's state
                continue
            if restarted:
                self._note(f"the script has loaded a newer checkpoint of its own before Session.open ({name}: {before})"
                           f", and trains on from {path}, where it is {now[name]}")  # fmt: skip
            else:
                raise ConfigError(
                    "state", f"{name}: {before}", f"nothing newer than {path}, where it is {now[name]}",
                    "The script has loaded a newer checkpoint of its own before Session.open. To train on from that "
                    "one, give resume='never'. To train on from the session's, load nothing there; in the `with` block "
                    "the script may load its own `if not s.resumed`.",
                )  # fmt: skip

    def resumed(self, path: Path | None) -> None:
        """The session has resumed from `path`, if there was one, and the script goes on."""
        if path is not None:
            self._path = path
            self._held = _updates(self._state), _some_values(self._state), self._state.which_weights()

    def opens(self) -> None:
        """The first update of a step is about to be made."""
        if self._path is None:
            return
        path, self._path, (updates, values, which) = self._path, None, self._held
        self._held = {}, [], []
        found = _some_values(self._state)
        exchanged = which != self._state.which_weights()  # by the optimizer itself
        same = exchanged or len(values) != len(found) or _same(values, found)
        if not same or updates != _updates(self._state):
            self._note(f"parameters or optimizer states were replaced between the resume from {path} and the first "
                       "update: by a checkpoint that the script loads itself? The position in the data, schedules and "
                       "extra are those of the resume. Load your own only `if not s.resumed`")  # fmt: skip


def _updates(state: TorchState) -> dict[str, int]:
    """How many updates each optimizer has made, as far as it counts them."""
    if state.engine is not None:
        return {"global_steps": int(state.engine.global_steps)}
    return {f"step of {state.optimizers.label(n)}": _largest(one) for n, one in state.optimizers.items.items()}


def _epochs(state: TorchState) -> dict[str, int]:
    named = state.schedulers.items.items()
    return {f"last_epoch of {state.schedulers.label(n)}": _number(getattr(one, "last_epoch", 0)) for n, one in named}


def _largest(optimizer: Any) -> int:
    rows = [*optimizer.state.values(), *optimizer.param_groups]
    return max((_number(row.get("step", 0)) for row in rows if isinstance(row, Mapping)), default=0)


def _number(value: object) -> int:
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return int(value)  # type: ignore[call-overload, no-any-return]
    return 0


def _same(values: list[Tensor], found: list[Tensor]) -> bool:
    try:
        return all(map(torch.equal, values, found))
    except RuntimeError:  # the script has moved its model to another device
        return True


def _some_values(state: TorchState) -> list[Tensor]:
    if state.engine is not None:
        return []
    try:
        return some_values(state.optimizers.values())
    except RuntimeError:  # a device that cannot be read
        return []
