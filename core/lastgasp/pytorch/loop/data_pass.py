"""One pass over the data of a custom loop, as `DataPosition` keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from lastgasp.pytorch.loop.position_record import Fixed
from lastgasp.pytorch.position import ELASTIC, IN_TURN, LoaderPosition, fetches_ahead, other_ranks


@dataclass(eq=False)
class DataPass:
    """One pass over one loader.

    Attributes:
        position: of the loader.
        parent: the pass in whose body it began.
        outer: a checkpoint was taken in its body, where another one ran.
        set_aside: that pass has gone on, or another epoch has begun, although this one is not over. It counts no more,
            unless the loop asks it again: then it runs beside that one.
        persists: it goes on from epoch to epoch of `session.epochs`.
        first, last: numbers of fetches, of all passes of this run: of the first batch that it gave, or the pass whose
            place it has taken; and of the newest. Before that -1 where it was resumed, and -2 where it was over then.
        consumed: batches given.
        over: it has no more.
        broken: the loop has dropped its iterator.
        asking: the loop asks for a batch at this moment.
        fetch: random state before the newest batch was fetched.
        again: `fetch` of an outer pass, whose newest batch a resume gives a second time.
        sampler: state of the user's sampler when it began, pickled.
        resumed: it began in an earlier run; ranks: how many that had, and this run.
        loaded: state given to its loader for that, until the loader is asked for a batch.
        empty: nothing was left of it, so the loader is not asked.
        in_turn: what was thrown away for that drew from the random state of the process all along, as what comes does.
    """

    loader: Any
    position: LoaderPosition
    parent: DataPass | None = None
    outer: bool = False
    set_aside: bool = False
    persists: bool = False
    first: int = 0
    last: int = 0
    consumed: int = 0
    over: bool = False
    broken: bool = False
    asking: bool = False
    fetch: bytes = b""
    again: bytes = b""
    sampler: bytes = b""
    resumed: bool = False
    ranks: tuple[int, int] = (1, 1)
    loaded: bytes = b""
    empty: bool = False
    in_turn: bool = False
    inner: Iterator[Any] | None = None
    _state: tuple[int, bytes] = (-1, b"")

    @property
    def kind(self) -> str:
        """How its position is restored."""
        return self.position.kind

    @property
    def inexact(self) -> str:
        """Why a resume in the middle of it is not exact; empty where nothing is known against it."""
        if self.resumed and self.ranks[0] != self.ranks[1] and self.kind != ELASTIC:
            return other_ranks(*self.ranks, self.consumed)
        return self.position.inexact or (IN_TURN if self.in_turn else "")

    @property
    def in_body(self) -> bool:
        """It has given a batch and has not been asked for the next one yet."""
        return self.last > 0 and not (self.over or self.broken or self.asking or self.set_aside)

    def state(self) -> bytes:
        """State of the loader after the newest batch; empty if it has none or is exhausted."""
        if not self.position.live or self.over:
            return b""
        if self._state[0] != self.consumed:
            self._state = self.consumed, self.loaded or self.position.state()
        return self._state[1]

    def ahead(self) -> bytes:
        """`fetch`, under which also the batch was made that waits; empty where none does, or it came with the first."""
        return self.fetch if self.consumed > 1 and not self.over and fetches_ahead(self.position) else b""

    def fixed(self) -> Fixed:
        """Its entry in a checkpoint; the part that changes only when the pass begins."""
        self.position.changed = False
        return Fixed(**msgspec.structs.asdict(self.position.start), sampler=self.sampler, fetch=self.again)


def weakly(loader: Any) -> Callable[[], Any]:
    """What returns `loader` as long as somebody else has it.

    A loop may make one for each pass, with worker processes that live as long as it does.
    """
    try:
        return weakref.ref(loader)
    except TypeError:  # a list
        return lambda: loader
