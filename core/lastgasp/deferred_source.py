"""A source of state that an adapter fills in later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from lastgasp.errors import NotSaveable
from lastgasp.ports import SaveResult, StateSource
from lastgasp.steps.attach import no_mark


class DeferredSource:
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
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return self.inner.buffer_fd if self.inner is not None else -1

    def _known(self) -> StateSource:
        if self.inner is None:
            raise NotSaveable("training has not begun")
        return self.inner

    def capture(self, step: int) -> bytes:
        """As the state says; empty without one."""
        return self.inner.capture(step) if self.inner is not None else b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """As the state says. Raises NotSaveable without one."""
        with self.mark:
            return self._known().save(step, aux, reason)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str | None:
        """As the state says."""
        return self._known().publish(result, parts)

    def discard(self, result: SaveResult) -> None:
        """As the state says."""
        if self.inner is not None:
            self.inner.discard(result)
