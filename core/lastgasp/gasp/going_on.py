"""A job that another backend leads goes on with fewer ranks, or with all again: what the controller is told before."""

from __future__ import annotations

from .again import Again
from .wire import Message


class Resize(Message, frozen=True, kw_only=True):
    """Rank of a job led by another backend: `members` (`Again.members`) go on from `step`, as `incarnation`.

    All that are there now and go on say the same, and join again then.
    """

    incarnation: int
    step: int
    members: tuple[int, ...]

    def order(self, world_size: int) -> Again:
        """The same, as it stands for a recovery that the controller has led."""
        lost = tuple(rank for rank in range(world_size) if rank not in self.members)
        return Again(
            incarnation=self.incarnation, step=self.step, source=0, takers=(), lost=lost, port=0, members=self.members
        )


class ResizeNoted(Message, frozen=True, kw_only=True):
    """Controller: it lets that incarnation in; or `why` it does not."""

    incarnation: int
    why: str = ""
