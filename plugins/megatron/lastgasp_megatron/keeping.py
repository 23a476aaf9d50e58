"""What only this rank holds, in memory that its host's launcher keeps when the rank is gone (docs/sharded.md)."""

from __future__ import annotations

from collections.abc import Callable

from lastgasp.adapter import Place, Session
from lastgasp.adapter.arenas import Arena, ArenaMode, Filling, buddy_of, lost_with_a_host
from lastgasp_megatron.source import MegatronSource
from lastgasp_megatron.steps import Boundary


class Keeping:
    """Fills this rank's arena at each step boundary. All calls on the training thread, by all ranks at the same steps.

    Nothing is copied before the first step has ended, behind which the optimizer's state was looked at.

    Args:
        source: says what there is to copy; mode: which steps are copied; settle: waits for the device.
    """

    def __init__(
        self,
        source: MegatronSource,
        mode: ArenaMode,
        place: Place,
        session: Session,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._source, self._open, self._settle = source, False, settle
        source.arena = arena = Arena()
        self._filling = Filling(arena, mode, session.gather, session.note, place.rank, buddy=buddy_of())

    def begin(self, boundary: Boundary) -> None:
        """The first step has ended, and the state was found to be sound, or not. Idempotent."""
        if not self._open:
            self._open = True
            self.keep(boundary)

    def keep(self, boundary: Boundary) -> None:
        """Copy what belongs to that step, if it is one of those that are copied. Never raises."""
        if self._open:
            self._filling.fill(boundary.step, lambda: self._source.payload(boundary), self._settle)

    def forget(self) -> None:
        """What was copied cannot be saved."""
        if self._source.arena is not None:
            self._source.arena.forget()

    def close(self) -> None:
        """Close this rank's end. Idempotent."""
        if self._source.arena is not None:
            self._source.arena.close()


def needs_arenas(place: Place, session: Session) -> bool:
    """Whether a shard of the state is on one rank only, or would go with one host and is to outlive it.

    All ranks call it together, and find the same.

    Raises:
        ControlError, DeadlineExceeded: the ranks could not agree.
    """
    if place.world_size < 2 or session.backend.backend != "embedded":
        return False
    alone = any(len(group) == 1 for group in place.replicas)
    return alone or lost_with_a_host(place.replicas, session.gather, buddy_of())
