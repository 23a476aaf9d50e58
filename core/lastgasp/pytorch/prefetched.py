"""Where a rank stands in its training data when something fetches a batch ahead of the loop (accelerate does).

The batch that waits was made before the boundary of a step, the next one will be made after it. Where random numbers
are drawn to choose or to make batches, each is repeated under the random state of its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from lastgasp.adapter.hooks import replace_attribute
from lastgasp.pytorch import rng
from lastgasp.pytorch.position.generators import OWN, OwnGenerators, places_of
from lastgasp.pytorch.position.loaders import is_map, makers, unordered
from lastgasp.pytorch.position.samplers import SamplerStart, SamplerTrack, track_sampler

_MAKERS = "23"
"""Of `makers`, the data set and the collate function."""


class PrefetchedPosition(msgspec.Struct, frozen=True):
    """Of one rank at a boundary.

    Args:
        start: how the pass over the data began.
        ahead: random state under which the batch was fetched that waits.
        own_ahead: states of the generators that the data set, its collate function and its sampler hold, then.
        own: the same at the boundary.
    """

    start: SamplerStart
    ahead: bytes
    own_ahead: bytes = b""
    own: bytes = b""

    @property
    def of_makers(self) -> bool:
        """Whether the data set or its collate function hold some: loaders of one data set have these in common."""
        return any(where[0] in _MAKERS for states in (self.own_ahead, self.own) for where in places_of(states))


class PrefetchedData:
    """Follows the loader that a training reads, below whatever fetches one batch ahead.

    Args:
        random: captures the random state of this process.

    Attributes:
        followed: whether its position can be restored exactly.
        reads: so many batches are read below for one of the training's.
        fetching, fetched: called before and after each batch is asked for; `fetched` is told whether there was one.
        inexact: called where a resumed pass may not give what was due, and told why.
    """

    def __init__(self, random: rng.RngRecorder) -> None:
        self._random, self._track, self._ahead, self._resumed = random, SamplerTrack(random), b"", b""
        self._own, self._own_ahead, self._own_due = OwnGenerators([], {}), b"", b""
        self.followed, self.reads = False, 1
        self._loader: Any = None
        self._pass: object = None
        self._make: Callable[[], Iterator[Any]]
        self._let_go: Callable[[], None] = lambda: None
        self.fetching: Callable[[], None] = lambda: None
        self.fetched: Callable[[bool], None] = lambda there: None
        self.inexact: Callable[[str], None] = lambda why: None

    def follow(self, loader: object) -> None:
        """Watch a DataLoader over a map-style dataset, and no other any more; anything else is left alone."""
        self._let_go()
        self.followed, self._pass = is_map(loader), None
        if self.followed:
            self._loader, self._track = loader, track_sampler(loader, self._random)
            self._own = OwnGenerators(makers(loader), self._random.used)
            self._let_go = replace_attribute(loader, "__iter__", self._around_iter)

    def _around_iter(self, original: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        self._make = original
        return lambda: self._batches(original)

    @property
    def position(self) -> PrefetchedPosition | None:
        """Where it stands; None before the first batch, and where the loader is not followed."""
        if not self._ahead:
            return None
        return PrefetchedPosition(self._track.start, self._ahead, self._own_ahead, self._own.states())

    @property
    def of_makers(self) -> bool:
        """As `PrefetchedPosition.of_makers`, of what is there now."""
        return PrefetchedPosition(SamplerStart(), b"", own=self._own.states()).of_makers

    def resume(self, position: PrefetchedPosition, consumed: int, more: bool) -> None:
        """The next pass repeats the one of `position`, without the first `consumed` batches of the training.

        Args:
            more: whether there are any others; where not, the sampler is left as that pass has left it.
        """
        self._track.resume(position.start, consumed * self.reads)
        self._pass = None
        if more:
            self._resumed, self._own_due = position.ahead, position.own_ahead
            return
        kept = self._random.snapshot()
        if self._loader.persistent_workers:  # their start, and the random numbers that it takes, were in that pass
            self._make()
        for _ in self._loader._index_sampler:
            pass
        rng.restore(rng.decode(kept))
        self._own.restore(position.own)

    def _batches(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._pass is not None:  # somebody looks at the data in the middle of the training's pass
            yield from make()
            return
        this = self._pass = object()
        try:
            yield from self._followed(make)
        finally:
            if self._pass is this:
                self._pass = None

    def _followed(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        ahead, self._resumed = self._resumed, b""
        kept = self._random.snapshot() if ahead else b""
        self._own.look()
        if not ahead:
            self._track.new_epoch()
        batches = make()
        if ahead:
            self._track.settle()
            if not self._loader.num_workers:  # they have drawn ahead
                self._own.restore(self._own_due)
            if why := unordered(self._loader) or self._track.inexact or (OWN if self._own.lost else ""):
                self.inexact(why)
            rng.restore(rng.decode(ahead))
        read = 0
        while True:
            if read % self.reads == 0:
                self._ahead, self._own_ahead = self._random.snapshot(), self._own.states()
            self.fetching()
            batch = next(batches, None)
            self.fetched(batch is not None)
            read += 1
            if kept and (batch is None or read % self.reads == 0):
                rng.restore(rng.decode(kept))
                kept = b""
            if batch is None:
                return
            yield batch
