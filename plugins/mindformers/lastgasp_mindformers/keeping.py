"""What only this rank holds, in memory that its host's launcher keeps when the rank is gone (docs/sharded.md)."""

from __future__ import annotations

from lastgasp.adapter import Session, cause_of
from lastgasp.adapter.arenas import Arena, ArenaMode, Filling
from lastgasp_mindformers.aux_state import Numbers
from lastgasp_mindformers.image import Piece, encoded
from lastgasp_mindformers.source import MindSporeSource
from lastgasp_mindformers.topology import is_sharded

_LOOKED = 2
"""Copies behind which it is looked at whether callbacks change what was copied; later ones at a fault."""


class Keeping:
    """Fills this rank's arena, where it holds a part of one training, at the end of each step. On the training thread,
    by all ranks at the same steps.

    Args:
        source: gets the arena; mode: which steps are copied.

    Attributes:
        on: whether there is one.
    """

    def __init__(self, source: MindSporeSource, mode: ArenaMode, session: Session) -> None:
        self._source, self._looked, self._changed = source, 0, ""
        self.on = mode != 0 and session.place.world_size > 1 and is_sharded() and session.backend.backend == "embedded"
        self._arena = Arena() if self.on else None
        self._filling: Filling | None = None
        if self._arena is not None:
            source.arena = self._arena
            self._filling = Filling(self._arena, mode, session.gather, session.note, source.rank)

    def fill(self, numbers: Numbers, aux: bytes) -> None:
        """The graph of that step has returned: copy it, if it is one of those that are copied. Never raises.

        Before anybody is told that the step is complete, so that it is in memory then.
        """
        if self._filling is not None:
            self._filling.fill(numbers.step, lambda: self._payload(aux))

    def _payload(self, aux: bytes) -> list[Piece]:
        try:
            if self._changed:
                raise ValueError(self._changed)
            return encoded(self._source.rank, aux, self._source.parameters())
        except Exception as error:  # whatever it is, it costs the arena and not the job
            raise ValueError(cause_of(error)) from error

    def look(self, step: int) -> None:
        """Other callbacks have seen the end of the step: they may have changed what was copied before."""
        if self._filling is None or not self._filling.every or step % self._filling.every or self._looked == _LOOKED:
            return
        self._looked += 1
        self._changed = self._source.changed_since_copied(step)
        if self._changed:
            self.forget()

    def forget(self) -> None:
        """What was copied must not be saved."""
        if self._arena is not None:
            self._arena.forget()

    def close(self) -> None:
        """Close this rank's end. Idempotent."""
        if self._arena is not None:
            self._arena.close()
