"""Whether a rank is slower than the others by more than chance, and since when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .robust_stats import SIGMA_OF_MAD, change_point, median, standing
from .sample import Matrix

MIN_SHARE, MIN_SHARE_OF_TWO = 0.10, 0.20
"""Share of the time of a step that a rank must lose to be named. Less is not worth a person's time, and equal ranks
differ by some percent throughout a job: another socket, another switch. With two ranks it is unknown which of them
is the normal one."""
MIN_SINGLE = 1.0
"""The slowdown in standard deviations of one block. With more scatter, ranks that are slow in turn look alike."""
MIN_CERTAINTY = 4.0
"""The slowdown in standard errors of its median, as if blocks were independent. As they are not quite, it is high."""
MIN_STANDING = 0.85
"""The mean share of the other ranks that this one exceeds, block by block; 0.5 is chance. With 4 ranks: nearly always
the slowest or the second."""
MIN_STANDING_OF_MANY = 0.70
"""The same where other ranks are slow as well: two slow ones of four take turns, and can reach 0.83 only."""
MIN_PART, PARTS = 0.5, 4
"""In each quarter of the window the slowdown must be this share of the total one: an episode, such as a neighbour's
job on the machine, is not the rank's own slowness."""
MIN_BLOCKS = 8
"""Fewer blocks prove nothing: an equal rank is the slowest of four in eight blocks of eight once in 65,000 jobs."""
LATER_BLOCKS, LATER_SHARE, LATER_CERTAINTY = 12, 0.15, 6.0
"""The same for a rank that has become slow: the window is chosen to show it, so more is asked of it."""
BEFORE = 0.3
"""Slow since a step: before it the slowdown was at most this share of that after it."""
ERROR_OF_MEDIAN = 1.2533
"""Standard error of a median: times the standard deviation by the root of the count (normal distribution)."""


@dataclass(frozen=True)
class Slowdown:
    """What a rank takes longer than the others in a window of blocks that ends with the newest.

    Attributes:
        rank: who.
        seconds: per step, the median over the blocks.
        share: of the time of a step.
        single: in standard deviations of one block.
        certainty: in standard errors of the median.
        standing: mean share of the others that it exceeds.
        largest: share of the blocks in which it is the slowest of all.
        steady: the smallest median of a quarter of the window, as a share of the window's.
        blocks: in the window.
        since: place of the block with which it began; 0: it has always been so.
    """

    rank: int
    seconds: float
    share: float
    single: float
    certainty: float
    standing: float
    largest: float
    steady: float
    blocks: int
    since: int = 0


def proven(found: Slowdown, ranks: int, others: int = 0) -> bool:
    """Whether a rank is named for this.

    Args:
        found: what was measured.
        ranks: how many are compared.
        others: how many others are slow as well.
    """
    least = LATER_SHARE if found.since else MIN_SHARE
    return (
        found.blocks >= (LATER_BLOCKS if found.since else MIN_BLOCKS)
        and found.share >= (least if ranks > 2 else MIN_SHARE_OF_TWO)
        and found.single >= MIN_SINGLE
        and found.certainty >= (LATER_CERTAINTY if found.since else MIN_CERTAINTY)
        and found.standing >= (MIN_STANDING_OF_MANY if others else MIN_STANDING)
        and found.steady >= MIN_PART
    )


def measure(matrix: Matrix, ranks: Sequence[int], usual: float) -> list[Slowdown]:
    """Each rank's slowdown: over all blocks, or since its own change point if only that is proven.

    Args:
        matrix: slowdowns, per rank and block, of at least two ranks.
        ranks: the ranks of the rows.
        usual: seconds that a step takes.
    """
    found = []
    for place, whole in enumerate(_window(matrix, ranks, 0, usual)):
        since = _since(matrix[place])
        later = _window(matrix, ranks, since, usual)[place] if since else whole
        found.append(later if proven(later, len(ranks), others=1) else whole)
    return found


def _window(matrix: Matrix, ranks: Sequence[int], first: int, usual: float) -> list[Slowdown]:
    rows = [row[first:] for row in matrix]
    count = len(rows[0])
    centres = [median(row) for row in rows]
    noise = SIGMA_OF_MAD * median([abs(v - centre) for row, centre in zip(rows, centres, strict=True) for v in row])
    noise = max(noise, 1e-9)
    columns = list(zip(*rows, strict=True))
    standings = list(zip(*map(standing, columns), strict=True))
    peaks = [max(column) for column in columns]
    return [
        Slowdown(
            rank=rank,
            seconds=centre,
            share=centre / usual if usual > 0 else 0.0,
            single=centre / noise,
            certainty=centre / noise * math.sqrt(count) / ERROR_OF_MEDIAN,
            standing=math.fsum(lasting) / count,
            largest=sum(map(float.__eq__, row, peaks)) / count,
            steady=min(map(median, _parts(row))) / centre if centre > 0 else 0.0,
            blocks=count,
            since=first,
        )
        for rank, row, centre, lasting in zip(ranks, rows, centres, standings, strict=True)
    ]


def _parts(row: Sequence[float]) -> list[Sequence[float]]:
    size = len(row) / PARTS
    return [row[round(size * k) : round(size * (k + 1))] for k in range(PARTS)] if len(row) >= 2 * PARTS else [row]


def _since(row: Sequence[float]) -> int:
    """Where the rank began to be slow; 0: it did not, or always was."""
    place = change_point(row, MIN_BLOCKS)
    if place is None:
        return 0
    before, after = median(row[:place]), median(row[place:])
    return place if after > 0 and before <= BEFORE * after else 0
