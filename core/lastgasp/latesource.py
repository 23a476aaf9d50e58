"""A source of state that an adapter fills in later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from lastgasp.errors import NotSaveable
from lastgasp.ports import SaveResult, StateSource
from lastgasp.steps.attach import no_mark


class LateSource:
    """The state, once there is one: a session must exist before the model does, for the ranks to agree on what to load.

    Attributes:
        inner: the adapter's own source; None before training begins.
        mark: marks a gasp's save.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.inner: StateSource | None = None
        self.mark: AbstractContextManager[None] = no_mark("save_checkpoint")

    @property
    def box(self) -> int:
        """The black box's descriptor."""
        return self.inner.box if self.inner is not None else -1

    def _known(self) -> StateSource:
        if self.inner is None:
            raise NotSaveable("training has not begun")
        return self.inner

    def capture(self, step: int) -> bytes:
        """As the state says; empty without one."""
        return self.inner.capture(step) if self.inner is not None else b""

    def save(self, step: int, small: Mapping[int, bytes], reason: str) -> SaveResult:
        """As the state says. Raises NotSaveable without one."""
        with self.mark:
            return self._known().save(step, small, reason)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str | None:
        """As the state says."""
        return self._known().publish(result, parts)

    def discard(self, result: SaveResult) -> None:
        """As the state says."""
        if self.inner is not None:
            self.inner.discard(result)
