"""Statistics that a few outliers do not move. Pure Python: the core has no numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence

SIGMA_OF_MAD = 1.4826
"""Times the median absolute deviation: the standard deviation of a normal distribution."""


def median(values: Sequence[float]) -> float:
    """The middle of at least one value."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of at least one value lie, interpolated."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def scale(values: Sequence[float], centre: float | None = None) -> float:
    """A standard deviation from the median absolute deviation."""
    middle = median(values) if centre is None else centre
    return SIGMA_OF_MAD * median([abs(value - middle) for value in values])


def slowdown(values: Sequence[float]) -> list[float]:
    """Each value less the median of the others; needs two values at least.

    The value itself is excluded: of two ranks, the slower one shows its full delay and not half of it.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    ordered = [values[index] for index in order]
    rest, middle = len(values) - 1, (len(values) - 1) // 2
    result = [0.0] * len(values)
    for place, index in enumerate(order):
        high = ordered[middle + (place <= middle)]
        if rest % 2:
            result[index] = ordered[place] - high
        else:
            low = ordered[middle - 1 + (place <= middle - 1)]
            result[index] = ordered[place] - (low + high) / 2
    return result


def standing(values: Sequence[float]) -> list[float]:
    """For each value, the share of the others that lie below it; a tie counts half."""
    rest = len(values) - 1
    ordered = sorted(values)
    below: dict[float, float] = {}
    first = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[first]:
            below[ordered[first]] = (first + (place - first - 1) / 2) / rest
            first = place
    return [below[value] for value in values]


def change_point(values: Sequence[float], margin: int) -> int | None:
    """Where the level of a series changes: the first index after the change, at least `margin` from both ends.

    The largest excursion of the cumulated sum, with values cut at three standard deviations so that a single spike
    makes no level. It locates a possible change without proving one. None: too short, or constant.
    """
    if len(values) < 2 * margin or margin < 1:
        return None
    middle = median(values)
    limit = 3 * scale(values, middle) or max(abs(value - middle) for value in values)
    cut = [min(max(value - middle, -limit), limit) for value in values]
    mean = math.fsum(cut) / len(cut)
    best, where, total = 0.0, None, 0.0
    for index, value in enumerate(cut[:-margin], start=1):
        total += value - mean
        if index >= margin and abs(total) > best:
            best, where = abs(total), index
    return where
