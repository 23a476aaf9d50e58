"""Where a sampler stands, so that a resumed run draws exactly the batches that are still due.

A map-style DataLoader draws its indices from a sampler. `TrackedSampler` stands in for it, notes the random
state under which each iteration began, and can begin an iteration again under that state and drop the part
that was consumed, without loading any data.

What a worker process draws itself (random augmentation with num_workers > 0) is beyond this: the workers of
the resumed run begin with their first item, so their random streams differ from the uninterrupted run's.
"""

from __future__ import annotations

import copy
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import wrapt
import xxhash

from lastgasp.pytorch import rng
from lastgasp.pytorch.position.compared import compared, is_compared, those_of
from lastgasp.pytorch.position.generators import OwnGenerators
from lastgasp.pytorch.position.protocol import CHANGED, IN_TURN


@dataclass
class SamplerStart:
    """How the current iteration of a sampler began.

    Args:
        base: batches of earlier iterations in the same epoch (CombinedLoader cycles short loaders).
        at_iter: random state when the iterator was made.
        at_first: random state when the first batch was drawn: most samplers shuffle only then.
        generators_at_iter: states of the loader's own generators, then.
        generators_at_first: the same at the first batch.
        digest: of the first batch of indices; empty where it is of something else. digests: of the others that are
            compared (`is_compared`).
        own_at_iter, own_at_first: states of what other generators the sampler holds, as `OwnGenerators` has them.
    """

    base: int = 0
    at_iter: bytes = b""
    at_first: bytes = b""
    generators_at_iter: tuple[bytes, ...] = ()
    generators_at_first: tuple[bytes, ...] = ()
    digest: bytes = b""
    own_at_iter: bytes = b""
    own_at_first: bytes = b""
    digests: list[bytes] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)


class SamplerTrack:
    """The position of one sampler.

    Args:
        recorder: captures random state.
        generators: generators of torch that the sampler draws from besides the global one.
        own: all generators that it holds.

    Attributes:
        start: how the current iteration began.
        changed: `start` has changed since the owner of the track set this to False.
        yielded: batches of the current iteration so far, those that were skipped included.
        differs: an iteration that was resumed began with another batch than it had begun with; later: one of the others
            that are compared is another one.
        in_turn: what was skipped drew from the random state of the process behind its first batch, too.
        skipped: called when a resumed iteration is where it was.
        followed: an iteration that begins now may be the training's.
    """

    def __init__(
        self, recorder: rng.RngRecorder, generators: Sequence[torch.Generator] = (), own: OwnGenerators | None = None
    ) -> None:
        self.start = SamplerStart()
        self.changed = True
        self.yielded = 0
        self.differs = self.later = self.in_turn = False
        self.followed = True
        self._recorder = recorder
        self._generators = list(generators)
        self._own = own if own is not None else OwnGenerators([], {})
        self.skipped: Callable[[], None] = lambda: None
        self._pending: tuple[SamplerStart, int] | None = None
        self._resumed: _Resumed | None = None
        self._untouched = False
        self._now: Callable[[], _Observed | None] = _none

    @property
    def under_way(self) -> bool:
        """The iteration that is followed has given a batch, and somebody holds it for the next one."""
        now = self._now()
        return now is not None and now.under_way

    @property
    def inexact(self) -> str:
        """Why a resumed iteration may not give what was due; empty where nothing is known against it."""
        if self.differs or (self.later and not self.in_turn):
            return CHANGED
        return IN_TURN if self.in_turn else ""

    def new_epoch(self) -> None:
        """The next iteration is the first one of an epoch."""
        self.start, self.yielded, self.changed = SamplerStart(), 0, True
        self.differs = self.later = self.in_turn = self._untouched = False
        self._now = _none

    def resume(self, start: SamplerStart, consumed: int) -> None:
        """The next iteration repeats the one that began as `start`, without its first batches.

        Args:
            start: as recorded.
            consumed: batches consumed in the epoch so far, those of earlier iterations included.
        """
        self._pending = (start, consumed - start.base)
        self._now = _none

    def begin(self, sampler: Any) -> Iterator[Any]:
        """Start an iteration of `sampler`.

        One that begins while another is under way is not the training's: somebody looks at its data.

        A loader with workers does so twice, and draws its base seed in between: the second time counts as the
        same iteration, begun under the random state of the first.
        """
        if not self.followed or self.under_way:
            return iter(sampler)
        begun = self._begin(sampler)
        self._now = weakref.ref(begun)
        return begun

    def _begin(self, sampler: Any) -> _Observed:
        if self._untouched:
            if self._resumed is not None:
                self._resumed = self._resumed.restarted(iter(sampler))
                return self._resumed
            return _Tracked(self, iter(sampler))
        self._untouched = True
        if self._pending is not None:
            start, skip = self._pending
            self._pending = None
            return self._again(sampler, start, skip)
        self.start = SamplerStart(self.start.base + self.yielded, self._recorder.snapshot())
        self.start.generators_at_iter, self.start.own_at_iter = self._states(), self._own.states()
        self.yielded, self.changed = 0, True
        return _Tracked(self, iter(sampler))

    def first(self) -> None:
        """The first batch of an iteration is about to be drawn."""
        self._untouched = False
        self.start.at_first = self._recorder.snapshot()
        self.start.generators_at_first, self.start.own_at_first = self._states(), self._own.states()
        self.changed = True

    def drew(self, item: Any, number: int) -> None:
        """A batch of indices, `number` of its iteration: remember it, or compare it with the one that is remembered."""
        if not is_compared(number):
            return
        same = compared(self.start, _digest(item), number)
        if same is None:
            self.changed = True
        elif not same:
            self.differs, self.later = self.differs or number == 1, True

    def _again(self, sampler: Any, start: SamplerStart, skip: int) -> _Resumed:
        start = replace(start, digest=start.digest if skip else b"", digests=those_of(start.digests, skip))
        self.start, self.yielded, self.changed = start, skip, True
        if start.at_iter:
            # left in place: the loader now draws its workers' base seed, which must be the same too
            rng.restore(rng.decode(start.at_iter))
            self._set(start.generators_at_iter)
        self._own.restore(start.own_at_iter)
        self._resumed = _Resumed(self, iter(sampler), start, skip)
        return self._resumed

    def settle(self) -> None:
        """Drop the consumed batches now, if an iteration is resumed and nothing was drawn yet.

        At the end of an epoch nothing more is drawn, but the generators must stand where they stood.
        """
        if self._resumed is not None:
            self._resumed.settle()

    def skip(self, inner: Iterator[Any], start: SamplerStart, skip: int) -> None:
        """Drop `skip` batches under the random state of `start` (if known), then put the random state back."""
        self._untouched = False
        self._resumed = None
        kept = self._recorder.snapshot()
        if start.at_first:
            rng.restore(rng.decode(start.at_first))
            self._set(start.generators_at_first)
        self._own.restore(start.own_at_first)
        begun = b""
        for number in range(skip):
            item = next(inner, _END)
            if item is _END:
                break
            self.drew(item, number + 1)
            if number == 0:
                begun = self._recorder.snapshot()
        self.in_turn = skip > 1 and self._recorder.snapshot() != begun
        rng.restore(rng.decode(kept))
        self.skipped()

    def _states(self) -> tuple[bytes, ...]:
        return tuple(bytes(g.get_state().numpy()) for g in self._generators)

    def _set(self, states: tuple[bytes, ...]) -> None:
        for generator, raw in zip(self._generators, states, strict=True):
            generator.set_state(rng.as_tensor(raw))


_END = object()


def _none() -> None:
    """No iteration yet."""


class _Observed(Iterator[Any]):
    under_way = False

    def __init__(self, track: SamplerTrack, inner: Iterator[Any]) -> None:
        self._track, self._inner = track, inner

    def _draw(self) -> Any:
        self.under_way = False
        item = next(self._inner)
        self.under_way = True
        self._track.yielded += 1
        self._track.drew(item, self._track.yielded)
        return item


class _Tracked(_Observed):
    _fresh = True

    def __next__(self) -> Any:
        return self._first() if self._fresh else self._draw()

    def _first(self) -> Any:
        self._fresh = False
        self._track.first()
        return self._draw()


class _Resumed(_Observed):
    def __init__(self, track: SamplerTrack, inner: Iterator[Any], start: SamplerStart, skip: int) -> None:
        super().__init__(track, inner)
        self._todo: tuple[SamplerStart, int] | None = (start, skip)

    def restarted(self, inner: Iterator[Any]) -> _Resumed:
        """The same over another iterator; nothing was drawn from this one."""
        assert self._todo is not None
        return _Resumed(self._track, inner, *self._todo)

    def settle(self) -> None:
        if self._todo is not None:
            start, skip = self._todo
            self._todo = None
            self._track.skip(self._inner, start, skip)

    def __next__(self) -> Any:
        self.settle()
        return self._draw()


class TrackedSampler(wrapt.ObjectProxy):  # type: ignore[misc,type-arg,unused-ignore]
    """A sampler or batch sampler, seen through: only its iteration is observed."""

    def __init__(self, sampler: Any, track: SamplerTrack) -> None:
        super().__init__(sampler)
        self._self_track = track

    def __iter__(self) -> Iterator[Any]:
        return self._self_track.begin(self.__wrapped__)

    def __copy__(self) -> Any:
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return untracked, (self.__wrapped__,)


def track_sampler(loader: Any, recorder: rng.RngRecorder) -> SamplerTrack:
    """Put a `TrackedSampler` before the index sampler of a map-style DataLoader. Idempotent.

    Returns:
        The track of an earlier call where there is one.
    """
    name = _sampler_name(loader)
    sampler = getattr(loader, name)
    if type(sampler) is TrackedSampler:
        known: SamplerTrack = sampler._self_track
        return known
    track = SamplerTrack(recorder, _generators(loader, sampler), OwnGenerators([sampler], recorder.used))
    # DataLoader refuses plain assignment: it cannot know that the order stays the same
    tracked = TrackedSampler(sampler, track)
    object.__setattr__(loader, name, tracked)
    iterator: Any = getattr(loader, "_iterator", None)
    if hasattr(iterator, "_index_sampler"):  # persistent workers, which have seen passes before this session
        iterator._index_sampler = tracked
    return track


def iterate(loader: Any) -> Iterator[Any]:
    """Begin an iteration of `loader`, the only one that is followed where its sampler is tracked."""
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler
    if type(sampler) is not TrackedSampler:
        return iter(loader)
    track: SamplerTrack = sampler._self_track
    track.followed = True
    try:
        return iter(loader)
    finally:
        track.followed = False


def untrack_sampler(loader: Any) -> None:
    """Undo `track_sampler`. Idempotent; any other loader is left as it is."""
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        if type(sampler) is TrackedSampler:
            object.__setattr__(loader, name, untracked(sampler))


def untracked(sampler: Any) -> Any:
    """The sampler behind a `TrackedSampler`, or the sampler itself."""
    # type(): isinstance would ask the wrapped object
    return sampler.__wrapped__ if type(sampler) is TrackedSampler else sampler


def _digest(item: Any) -> bytes:
    try:
        return xxhash.xxh3_128_digest(array("q", item if isinstance(item, list | tuple) else [item]).tobytes())
    except (TypeError, OverflowError):  # no plain indices
        return b""


def _sampler_name(loader: Any) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators, other than the global one, that `loader` and its samplers draw from."""
    return _generators(loader, index_sampler(loader))


def index_sampler(loader: Any) -> Any:
    """The user's sampler or batch sampler, without what tracks it; None where there is none."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:  # a sampler may have a length, and the length 0
        sampler = getattr(loader, "sampler", None)
    return untracked(sampler)


def _generators(loader: Any, sampler: Any) -> list[torch.Generator]:
    owners = (loader, sampler, getattr(sampler, "sampler", None), getattr(loader, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(unique.values())
