"""Persistent workers of data loaders that a loop does not give to `s.batches`, such as one that it validates with.

The first pass over such a loader starts them, and takes a random number of the process for it, unless the loader has a
generator of its own. Behind a resume a new process starts them once more: where they had run at the boundary, what
their start takes is put back, and random numbers are those of a run without a fault. A loader that is made anew for
each pass takes a number each time, behind a resume too; it is told from others in that it does not live on.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

ONCE = (
    "a DataLoader with persistent_workers that is not given to s.batches ({}) had been iterated once before the step "
    "that this run resumes from: it is taken for the one that is iterated now. Where the loop makes a new one for each "
    "pass, random numbers from here on are other ones: give it generator=torch.Generator()"
)
_WRAPS = ("base_dataloader", "_dataloader")
"""Where the wrappers of accelerate and Fabric have theirs."""


class Ran(NamedTuple):
    """Of one kind of loader, at a boundary.

    Args:
        starts: how often workers were started.
        lasting: how many such loaders had been iterated more than once; once: how many others were there.
        reused: whether any has been, also of those that are not there any more.
    """

    starts: int
    lasting: int
    once: int = 0
    reused: int = 0


_given: weakref.WeakSet[Any] = weakref.WeakSet()
_passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_starts: Counter[str] = Counter()
_due: Counter[str] = Counter()
_at_boundary: dict[str, Ran] = {}
_changed, _counted = False, 0
_unsure: Counter[str] = Counter()
_reused: set[str] = set()
_epochs = 0
_early: weakref.WeakSet[Any] | None = None
"""Which were there when the resumed epoch had ended; None before."""
_tell: Callable[[str], object] = str


def watch() -> None:
    """From now on count the starts of workers, and passes. Idempotent."""
    if not hasattr(_BaseDataLoaderIter.__init__, "_lastgasp"):
        _BaseDataLoaderIter.__init__ = _started(_BaseDataLoaderIter.__init__)  # type: ignore[method-assign]
        _BaseDataLoaderIter._reset = _begun(_BaseDataLoaderIter._reset)  # type: ignore[method-assign]


def given(loader: Any) -> None:
    """Leave this one out, whose start is that of a pass; call it before it is iterated."""
    for one in (loader, *(vars(loader).get(name) for name in _WRAPS if hasattr(loader, "__dict__"))):
        if _is_known(one):
            _given.add(one)


def step_over() -> None:
    """Everything stands on a boundary."""
    global _at_boundary, _changed, _counted
    if _changed or len(_passes) != _counted:  # some are not there any more
        _changed, _counted = False, len(_passes)
        lasting, once = _alive()
        _at_boundary = {
            kind: Ran(starts, lasting[kind] + _due[kind], once[kind] + _unsure[kind], int(kind in _reused))
            for kind, starts in _starts.items()
        }


def epoch_begins() -> None:
    """Of the numbered epochs of a loop. What is made behind the one that was resumed was not there at the boundary."""
    global _epochs, _early
    _epochs += 1
    if _epochs == 2 and (+_due or +_unsure):
        found = [one for one in gc.get_objects() if issubclass(type(one), DataLoader)]
        _early = weakref.WeakSet(filter(_is_known, found))


def running() -> dict[str, tuple[int, ...]]:
    """What there was at the boundary, by kind of loader; for the record of a checkpoint."""
    return {kind: (*ran,) for kind, ran in _at_boundary.items()}


def resume(ran: Mapping[str, tuple[int, ...]], tell: Callable[[str], object] = str) -> None:
    """This process goes on from a boundary at which that had run, here or in another process.

    Args:
        tell: is told where random numbers may be other ones.
    """
    global _at_boundary, _tell, _epochs, _early
    _epochs, _early = 0, None
    if _passes and ran:
        gc.collect()  # of what this process has left, in cycles
    here, _tell = sum(_alive(), Counter[str]()), tell
    _at_boundary = {kind: Ran(*counts) for kind, counts in ran.items()}
    for known in (_starts, _due, _unsure, _reused):
        known.clear()
    for kind, (starts, lasting, once, reused) in _at_boundary.items():
        _starts[kind] = starts
        _reused.update([kind] * reused)
        # else some were made for one pass, and these as well
        unsure = once if starts == lasting + once or reused else 0
        _due[kind] = max(0, lasting - here[kind])
        _unsure[kind] = max(0, lasting + unsure - here[kind]) - _due[kind]


def _alive() -> tuple[Counter[str], Counter[str]]:
    """Loaders of each kind that are there: iterated more than once, and others."""
    lasting, once = Counter[str](), Counter[str]()
    for one, passes in _passes.items():
        if kind := _kind(one):
            (lasting if passes > 1 else once)[kind] += 1
    return lasting, once


def _started(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def started(self: Any, loader: Any, *args: Any, **options: Any) -> None:
        global _changed
        kind = _kind(loader)
        due = _due if _due[kind] else _unsure
        again = bool(kind) and due[kind] > 0 and (_early is None or loader in _early)
        before = torch.get_rng_state() if again else None
        original(self, loader, *args, **options)
        if before is not None:
            torch.set_rng_state(before)
            due[kind] -= 1
            if due is _unsure and not due[kind]:
                _tell(ONCE.format(kind))
        elif kind:
            _starts[kind] += 1
        if kind:
            _changed, _passes[loader] = True, int(again)

    started._lastgasp = True  # type: ignore[attr-defined]
    return started


def _begun(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def begun(self: Any, loader: Any, *args: Any, **options: Any) -> None:
        global _changed
        if _is_known(loader) and loader in _passes:
            _changed = _changed or _passes[loader] < 2
            _passes[loader] += 1
            if _passes[loader] == 2:
                _reused.add(_kind(loader))
        original(self, loader, *args, **options)

    return begun


def _is_known(loader: Any) -> bool:
    """It is a DataLoader, and of no class of a user's that compares its loaders."""
    return isinstance(loader, DataLoader) and type(loader).__hash__ is object.__hash__


def _kind(loader: Any) -> str:
    """By which a loader is known in another process; empty for one whose start needs nothing."""
    if not _is_known(loader) or not loader.num_workers or not loader.persistent_workers:
        return ""
    if loader.generator is not None or loader in _given:
        return ""
    dataset: Any = loader.dataset
    try:
        size = f" of {len(dataset)}"
    except Exception:  # a stream, or a length of the user's that is not known
        size = ""
    return f"{type(dataset).__qualname__}{size}, {loader.batch_size} by {loader.num_workers}"
