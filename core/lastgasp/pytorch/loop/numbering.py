"""Whether a loop numbers its batches itself, by `enumerate`, which starts at 0 again in a resumed pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from inspect import CO_GENERATOR
from types import FrameType, GeneratorType
from typing import Any

NUMBERS = (
    "this loop numbers its batches with enumerate(), which starts at 0 again in a pass that is resumed in its middle. "
    "If anything follows from that number (a learning rate, when to update, to log or to save), give it "
    "s.enumerate(loader) in place of s.batches(loader), and take the pairs from that, also through tqdm and the like: "
    "`for i, batch in tqdm(s.enumerate(loader))`"
)
"""Said when such a loop begins."""


def numbered_anew(number: int, before: int, batches: int, step: int) -> str:
    """What to note of a resumed pass, to whose first batch the loop gives `number`; empty if that may be right.

    Args:
        before: how many batches of the pass came before it; batches: how many a pass has, 0 if nobody knows.
        step: the loop's, by which it may count.
    """
    ahead = number - before
    if ahead in (0, 1) or (batches and ahead % batches == 0):  # counted from 0, from 1, or over all passes
        return ""
    if ahead > 1 and (number - step in (0, 1) or not batches or number % batches > 1):  # over passes of any length
        return ""
    return (
        f"this loop numbers its batches with enumerate(), which calls the first one of the resumed pass {number}, "
        f"although {before} came before it: what follows from that number (a learning rate, when to update, to log or "
        "to save) is not what it would be without the fault. Use s.enumerate(loader), also through tqdm and the like"
    )


class Promotions:
    """Whether the garbage collector may have moved objects into its oldest generation since this was created."""

    def __init__(self) -> None:
        self._count = self._now()

    @staticmethod
    def _now() -> int:
        return sum(one["collections"] for one in gc.get_stats()[1:])

    def none(self) -> bool:
        """It has not: what was created just before is among the few youngest objects."""
        return self._count == self._now()


def number_of(iterator: Iterator[Any], frame: FrameType | None, since: Promotions) -> int | None:
    """The number that an `enumerate` gives to the batch that `iterator` is asked for now; None if there is no such one.

    Args:
        frame: which asks; generators between it and the `enumerate` (tqdm is one) are looked through.
        since: created before the pass began. An `enumerate` is created right before that, so only young objects are
            looked at, unless the collector has run meanwhile: the whole heap takes a tenth of a second.
    """
    held: Any = iterator
    while frame is not None:
        found = _holder(held, frame, since)
        if found is None:
            return None
        if isinstance(found, enumerate):
            return int(found.__reduce__()[1][1])
        held, frame = found, frame.f_back
    return None


def _holder(held: Any, frame: FrameType, since: Promotions) -> enumerate[Any] | GeneratorType[Any, Any, Any] | None:
    """The `enumerate` that iterates over `held`; or else the generator that does it in `frame`."""
    for age in (0, 1) if since.none() else ():
        objects = gc.get_objects(generation=age)
        try:
            if (found := _first(objects, held, frame)) is not None:
                return found
        finally:
            objects.clear()  # a list of everything must never be part of a cycle: Python 3.11 crashes at memoryviews
    if since.none():  # another thread may have had the collector run meanwhile
        return None
    return _first(gc.get_referrers(held, frame), held, frame)


def _first(objects: list[Any], held: Any, frame: FrameType) -> enumerate[Any] | GeneratorType[Any, Any, Any] | None:
    generator = None
    for one in objects:
        if type(one) is enumerate:
            if any(source is held for source in gc.get_referents(one)):
                return one
        elif type(one) is GeneratorType and any(source is frame for source in gc.get_referents(one)):
            generator = one
    return generator if frame.f_code.co_flags & CO_GENERATOR else None
