"""A loop that reports its steps itself, but draws its batches from a DataLoader that it does not give to `s.batches`.

Nothing knows where such a loop is in its data: a resumed run would train on the first batches of the pass again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_SEEN, _COMPARED = 2, 3
"""Steps at whose ends iterators are looked for, and looked at again."""


class UnknownLoaders:
    """Tells of them once.

    Args:
        note: reports what people must know (`Session.note`).
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note, self._steps = note, 0
        self._found: list[tuple[weakref.ref[Any], int]] = []

    def step_over(self) -> None:
        """The loop has reported a step, and is in no pass of `s.batches`."""
        self._steps += 1
        if self._steps == _SEEN:
            found = [one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter)]
            self._found = [(weakref.ref(one), one._num_yielded) for one in found]
        elif self._steps == _COMPARED:
            given = [one._num_yielded > before for known, before in self._found if (one := known()) is not None]
            self._found = []
            if any(given):
                self._note("the batches of this loop come from a DataLoader that is not given to s.batches(): a "
                           "resumed run begins its pass anew, and trains on other data. Write `for batch in "
                           "s.batches(loader)`")  # fmt: skip
