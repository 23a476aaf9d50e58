"""The order in which xdist's workers get the tests: each begins with a share of the long ones.

At the end of a run nothing is then left but short ones. Otherwise a worker is still on a test of a minute, with another
behind it that nobody may take over any more, when the others have run out of work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


def shares(tests: Sequence[T], workers: int, rank: Callable[[T], int]) -> list[T]:
    """All tests, so that each worker's part (`parts`) begins with those of a low rank. Neighbours stay together.

    Args:
        rank: 0 for what takes longest, 1, or 2 for what takes no time.
    """
    long, middle, short = ([test for test in tests if rank(test) == each] for each in range(3))
    ordered: list[T] = []
    pieces = zip(parts(len(long), workers), parts(len(middle), workers), parts(len(tests), workers), strict=True)
    done = 0
    for of_long, of_middle, of_all in pieces:
        share = long[slice(*of_long)] + middle[slice(*of_middle)]
        room = of_all[1] - of_all[0] - len(share)
        ordered += share + short[done : done + room]
        done += max(0, room)
    return ordered + short[done:]


def parts(number: int, workers: int) -> list[tuple[int, int]]:
    """Begin and end of what each worker is sent first: xdist's worksteal cuts the list into equal parts."""
    sizes, left = [], number
    for others in range(workers, 0, -1):
        sizes.append(left // others)
        left -= sizes[-1]
    return list(pairwise(accumulate(sizes, initial=0)))
