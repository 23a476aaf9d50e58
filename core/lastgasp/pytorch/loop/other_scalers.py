"""`GradScaler`s that are not in the `TorchState`: in a resumed run they begin with their first scale again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.amp import GradScaler

from lastgasp.pytorch.loop.other_schedulers import living, patched, within

FORGOTTEN = (
    "a GradScaler is used that is not in TorchState: no checkpoint holds its scale. A resumed run begins with the "
    "first one, and skips updates until it has come down. Give TorchState(..., scaler=scaler), a second one in extra"
)
"""Note of one that has scaled a loss."""


class OtherScalers:
    """Names one that is used while the session is open.

    Args:
        state: the `TorchState`.
        note: reports what people must know (`Session.note`).
    """

    def __init__(self, state: Any, note: Callable[[str], object]) -> None:
        self._state, self._note = state, note
        self._seen = [ref(one) for one in living(GradScaler) if not _used(one)]
        self._undo: list[Callable[[], object]] = [patched(GradScaler, lambda one: self._seen.append(ref(one)))]

    def remove(self) -> None:
        """What is made from here on is not seen. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def step_over(self) -> None:
        """A step is complete."""
        if not self._seen:
            return
        used = [one for one in (seen() for seen in self._seen) if one is not None and _used(one)]
        if not used:
            return
        self._seen = [seen for seen in self._seen if not _used(seen())]
        known = {id(self._state.scaler)} | {id(one) for one in within(list(self._state.extra.values()), GradScaler)}
        if any(id(one) not in known for one in used):
            self._note(FORGOTTEN)


def _used(scaler: Any) -> bool:
    """Whether it has scaled a loss: it makes its tensor then."""
    return getattr(scaler, "_scale", None) is not None and bool(getattr(scaler, "_enabled", False))
