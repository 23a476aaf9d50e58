"""A job goes on with fewer ranks, or with all again: what the controller is told before."""

from __future__ import annotations

import msgspec

from .again import Again
from .wire import Message


class Fewer(msgspec.Struct, frozen=True, array_like=True):
    """Whether, and how, a training may be entered again with fewer ranks.

    Attributes:
        may: it may.
        why: what stands in the way, in words; empty where nobody has asked for it (an `ElasticLoader`).
        parts: the equal parts that a step has, which its ranks must share evenly; 0: they need not.
    """

    may: bool = False
    why: str = ""
    parts: int = 0


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
