"""A source of state that an adapter fills in later."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from lastgasp.errors import NotSaveable
from lastgasp.ports import InPlace, SaveResult, StateSource
from lastgasp.steps.attach import no_mark

TOO_LATE = (
    "a new process has to join MindIO before its process group is made, which lastgasp.pytorch.train, Lightning's fit "
    "and Megatron's pretrain have it do where recovery is 'auto', in the first training of a script"
)


class DeferredSource:
    """Forwards to a source set later: a session must exist before the model, for the ranks to agree on what to load.

    Attributes:
        inner: the adapter's own source; None before training begins.
        mark: the step mark around a gasp's save.
        in_place: continues the training in the same process by another leader's orders; None where that cannot be,
            and `not_in_place` says why. `no_recover`: why no new process could take a lost rank's place in it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.inner: StateSource | None = None
        self.in_place: InPlace | None = None
        self.not_in_place, self.no_recover = "", TOO_LATE
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
        """As the inner source; empty without one."""
        return self.inner.capture(step) if self.inner is not None else b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """As the inner source. Raises NotSaveable without one."""
        with self.mark:
            return self._known().save(step, aux, reason)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str | None:
        """As the inner source."""
        return self._known().publish(result, parts)

    def discard(self, result: SaveResult) -> None:
        """As the inner source."""
        if self.inner is not None:
            self.inner.discard(result)
