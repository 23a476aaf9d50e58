"""The order in which xdist's workers get the tests: long ones first, and about as many seconds of them for each.

At the end of a run nothing is then left but short ones. Otherwise a worker is still on a test of a minute, with another
behind it that nobody may take over any more, when the others have run out of work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import TypeVar

T = TypeVar("T")

LONG = 1.0
"""Seconds from which on a test is a long one."""


def shares(
    tests: Sequence[T], workers: int, seconds: Callable[[T], float], family: Callable[[T], tuple[str, str]]
) -> list[T]:
    """All tests, so that each worker's part (`parts`) begins with its share of the long ones.

    Args:
        seconds: how long a test takes, about.
        family: of tests that have something made once, which is made once more in each part; and the one inside of it,
            where all of the first are more than a share.
    """
    cuts = parts(len(tests), workers)
    long: list[list[T]] = [[] for _ in cuts]
    for group in _heaviest_first([test for test in tests if seconds(test) >= LONG], workers, seconds, family):
        least = min(range(workers), key=lambda n: sum(map(seconds, long[n])))
        long[least] += group
    short = [test for test in tests if seconds(test) < LONG]
    ordered: list[T] = []
    for share, (begin, end) in zip(long, cuts, strict=True):
        room = max(0, end - begin - len(share))
        ordered += share + short[:room]
        del short[:room]
    return ordered + short


def _heaviest_first(
    tests: list[T], workers: int, seconds: Callable[[T], float], family: Callable[[T], tuple[str, str]]
) -> list[list[T]]:
    share, families = sum(map(seconds, tests)) / workers, list[list[T]]()
    for _, kin in groupby(sorted(tests, key=family), lambda test: family(test)[0]):
        group = list(kin)
        small = sum(map(seconds, group)) <= share
        families += [group] if small else [list(one) for _, one in groupby(group, family)]
    return sorted(families, key=lambda group: -sum(map(seconds, group)))


def parts(number: int, workers: int) -> list[tuple[int, int]]:
    """Begin and end of what each worker is sent first: xdist's worksteal cuts the list into equal parts."""
    sizes, left = [], number
    for others in range(workers, 0, -1):
        sizes.append(left // others)
        left -= sizes[-1]
    return list(pairwise(accumulate(sizes, initial=0)))
