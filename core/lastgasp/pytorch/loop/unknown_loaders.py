"""Loops of which nothing knows where they are in their data: a resumed run trains on other batches.

One reports its steps itself, but draws its batches from a DataLoader that it does not give to `s.batches`, or by
positions in objects of its own; one gives `s.batches` to `itertools.cycle`, which keeps the batches of the first pass
and never asks for another.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection
from itertools import cycle
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from lastgasp.pytorch.loop.positions_of_its_own import PositionsOfItsOwn

_SEEN, _COMPARED = 2, 3
"""Steps at whose ends iterators are looked for, and looked at again."""
_LOADERS = 8
"""Of so many, the first pass is looked at when it ends: that takes a twentieth of a second."""


class UnknownLoaders:
    """Tells of each kind once.

    Args:
        note: reports what people must know (`Session.note`).
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note, self._steps = note, 0
        self._positions: PositionsOfItsOwn | None = None
        self._ended: set[int] = set()
        self._found: list[tuple[weakref.ref[Any], int]] = []

    def step_over(self, saved: Collection[object], step: int) -> None:
        """The loop has reported a step, and is in no pass of `s.batches`: call it in what the loop calls.

        Args:
            saved: objects whose state checkpoints hold.
            step: its number.
        """
        self._steps += 1
        if self._steps == _SEEN:
            found = [one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter)]
            self._found = [(weakref.ref(one), one._num_yielded) for one in found]
            self._positions = PositionsOfItsOwn(sys._getframe(2), saved)
        elif self._steps == _COMPARED:
            given = [one._num_yielded > before for known, before in self._found if (one := known()) is not None]
            self._found = []
            if self._positions is not None and (moved := self._positions.moved(step)):
                self._note(moved)
            self._positions = None
            if any(given):
                self._note("the batches of this loop come from a DataLoader that is not given to s.batches(): a "
                           "resumed run begins its pass anew, and trains on other data. Write `for batch in "
                           "s.batches(loader)`")  # fmt: skip

    def pass_over(self, iterator: object, loader: object) -> None:
        """A pass of `s.batches` over `loader` has no more batches for whoever holds `iterator`."""
        if id(loader) in self._ended or len(self._ended) == _LOADERS:
            return
        self._ended.add(id(loader))
        if any(type(one) is cycle for one in gc.get_referrers(iterator)):
            self._note("itertools.cycle repeats the batches of the first pass, and none of its turns is known to "
                       "lastgasp: steps are not seen to end, and a resumed run gets other data. Write `def endless(): "
                       "while True: yield from s.batches(loader)`")  # fmt: skip
