"""The judge's input: the same steps of ranks that do the same work, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .job import Job, RankData
from .lateness import Members, lateness, synchronising
from .robust_stats import median
from .table import Collective

BLOCK = 8
"""Steps whose mean is one observation. A loader with four workers may be slow at every fourth step only: the median
over single steps would not see it."""
BLOCKS_MIN = 24
"""Blocks become shorter rather than fewer than this."""
VALUES_MAX = 400_000
"""Steps times ranks that are looked at; evenly spread blocks of them where there are more."""
LATE_MAX = 40_000
"""The same for steps with collectives, which take longer to match."""
MATCHED_MAX = 800_000
"""Collectives of all ranks that are matched, some 4 s; but `BLOCKS_MIN` blocks in any case."""
WARM_UP, WARM_UP_SHORT, SHORT_JOB = 10, 3, 100
"""First steps of each process that are left out: compiling, caches, workers that start. The short one holds for a job
of fewer than `SHORT_JOB` steps."""
COVERAGE = 0.5
"""A rank with less than this share of the steps of most ranks is left out, with a remark."""
BEHIND = 0.05
"""So is one whose newest step is further back than this share of the steps (and two blocks): its files end there."""
COLUMNS = ("time", "period", "data", "forward", "backward", "optimizer", "forward_own", "backward_own")
WITHIN_FORWARD = ("tp", "cp", "ep")
"""Groups whose collectives are within forward and backward: who waits there seems to compute."""

Matrix = tuple[tuple[float, ...], ...]
"""Per rank, in the order of `Sample.ranks`, per block: seconds per step."""


@dataclass(frozen=True)
class Blocks:
    """Block means of some columns.

    Attributes:
        size: steps per block.
        steps: number of the first step of each block.
        columns: name -> matrix.
    """

    size: int
    steps: tuple[int, ...]
    columns: Mapping[str, Matrix]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Sample:
    """Ranks that do the same work (one pipeline stage), and their common steps.

    Attributes:
        ranks: in rising order.
        usual: seconds of a step, from the end of one to the end of the next: the median over steps and ranks.
        saves: per rank, seconds per step that saving takes, on the average.
        count: how many steps they have in common, after the warm-up.
        first, last: the first and last number of these; 0 without any.
        own: the columns `COLUMNS`; NaN in `backward_own` where its collectives are not marked, and `forward_own` with
            the collectives in it in steps that have none marked on some rank.
        late: the column `late`, of the steps that have collectives on all ranks; None where there are none.
        communicate: the ranks with marked collectives.
        renewed: of ranks with steps of an earlier process: the first step of the newest one, and its host, if known.
        partners: of ranks of a tensor, context or expert parallel group: its members, which wait for one another
            within forward and backward.
        left_out: ranks with too few of the steps, or whose steps end before those of the others: rank -> its newest.
    """

    ranks: tuple[int, ...]
    usual: float
    saves: tuple[float, ...]
    count: int
    first: int
    last: int
    own: Blocks
    late: Blocks | None = None
    communicate: tuple[int, ...] = ()
    renewed: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    partners: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    left_out: Mapping[int, int] = field(default_factory=dict)


def samples(job: Job, last: int | None = None) -> list[Sample]:
    """One sample for each set of ranks that do the same work.

    Args:
        last: look at that many of the newest steps only.
    """
    return [_sample(job, ranks, last) for ranks in peers(job.ranks)]


def peers(ranks: Mapping[int, RankData]) -> list[tuple[int, ...]]:
    """Ranks by pipeline stage: the first stage embeds and the last one has the loss, so they cannot be compared.

    The stage is a rank's place in its group `pp` of parallel_group.json; without one all ranks do the same work.
    """
    stages: dict[int, list[int]] = {}
    for rank, data in sorted(ranks.items()):
        places = [group.group_rank for group in data.groups.values() if group.group_name == "pp"]
        stages.setdefault(min(places, default=0), []).append(rank)
    return [tuple(stage) for _, stage in sorted(stages.items())]


def _sample(job: Job, ranks: Sequence[int], last: int | None) -> Sample:
    warm = {rank: _warm(job.ranks[rank]) for rank in ranks}
    usual = sorted(map(len, warm.values()))[len(warm) // 2]
    newest = {rank: max(warm[rank], default=0) for rank in ranks}
    since = sorted(newest.values())[len(newest) // 2] - max(2 * BLOCK, BEHIND * usual)
    kept = [rank for rank in ranks if warm[rank] and len(warm[rank]) >= COVERAGE * usual and newest[rank] >= since]
    common = sorted(set.intersection(*(set(warm[rank]) for rank in kept))) if kept else []
    common = common[-last:] if last is not None else common
    places = {rank: warm[rank] for rank in kept}
    saves = [[job.ranks[rank].table.times("save")[place[step]] for step in common] for rank, place in places.items()]
    counted = len(common)
    common = _without_saves(common, saves)
    return Sample(
        tuple(kept),
        _usual(job, places, common),
        tuple(sum(row) / max(1, counted) for row in saves),
        len(common),
        common[0] if common else 0,
        common[-1] if common else 0,
        _own(job, places, common),
        _late(job, places, common) if len(kept) > 1 else None,
        tuple(rank for rank, place in places.items() if _communicates(job.ranks[rank], place, common)),
        {rank: begun for rank in kept if (begun := _renewed(job.ranks[rank], common)) is not None},
        {rank: group for rank in kept if (group := _partners(job.ranks[rank]))},
        {rank: newest[rank] for rank in ranks if rank not in kept},
    )


def _without_saves(common: Sequence[int], saves: Sequence[Sequence[float]]) -> list[int]:
    """Steps with a save, and those after them, say nothing about the others; unless most steps are such."""
    saved = {step for row in saves for step, seconds in zip(common, row, strict=True) if seconds}
    rest = [step for step in common if step not in saved and step - 1 not in saved]
    return rest if 2 * len(rest) >= len(common) else list(common)


def _renewed(data: RankData, common: Sequence[int]) -> tuple[int, str] | None:
    begun = data.table.numbers[data.table.newest_process()]
    return (begun, data.information.host) if common and begun > common[0] else None


def _partners(data: RankData) -> tuple[int, ...]:
    groups = [group.global_ranks for group in data.groups.values() if group.group_name in WITHIN_FORWARD]
    return tuple(sorted(set().union(*groups)))


def _communicates(data: RankData, place: Mapping[int, int], common: Sequence[int]) -> bool:
    seconds = data.table.times("communication")
    return any(seconds[place[step]] for step in common)


def _usual(job: Job, places: Mapping[int, Mapping[int, int]], common: Sequence[int]) -> float:
    steps = _spread(common, 1, VALUES_MAX // max(1, len(places)))
    tables = {rank: job.ranks[rank].table.times("period") for rank in places}
    return median([tables[rank][place[step]] for rank, place in places.items() for step in steps]) if steps else 0.0


def _warm(data: RankData) -> dict[int, int]:
    """Step number -> place in the table, without the first steps of each process."""
    table = data.table
    skip = WARM_UP if len(table) >= SHORT_JOB else WARM_UP_SHORT
    return {number: place for place, number in enumerate(table.numbers) if table.nths[place] > skip}


def _own(job: Job, places: Mapping[int, Mapping[int, int]], common: Sequence[int]) -> Blocks:
    size = _size(len(common))
    steps = _spread(common, size, VALUES_MAX // max(1, len(places)))

    def values(column: str) -> list[list[float]]:
        tables = {rank: job.ranks[rank].table.times(column) for rank in places}
        return [[tables[rank][place[step]] for step in steps] for rank, place in places.items()]

    def comparable(column: str) -> list[list[float]]:
        if column != "forward_own":
            return values(column)
        both = zip(values(column), values("forward"), strict=True)
        return [[a if every else b for a, b, every in zip(own, whole, marked, strict=True)] for own, whole in both]

    marked = [all(row) for row in zip(*values("communication"), strict=True)]
    return _blocks(steps, size, COLUMNS, comparable)


def _late(job: Job, places: Mapping[int, Mapping[int, int]], common: Sequence[int]) -> Blocks | None:
    marked = [
        step
        for step in common
        if all(job.ranks[rank].table.collective_count(place[step]) for rank, place in places.items())
    ]
    size = _size(len(marked))
    counts = [job.ranks[rank].table.collective_count(place[step]) for rank, place in places.items() for step in marked]
    matched = MATCHED_MAX * len(marked) // max(1, sum(counts))
    steps = _spread(marked, size, max(BLOCKS_MIN * size, min(matched, LATE_MAX // max(1, len(places)))))
    rows = [lateness({rank: _collectives(job, rank, place[step]) for rank, place in places.items()}) for step in steps]
    if not any(rows):
        return None
    return _blocks(steps, size, ["late"], lambda _: [[row.get(rank, 0.0) for row in rows] for rank in places])


def _collectives(job: Job, rank: int, place: int) -> list[tuple[Members, Collective]]:
    data = job.ranks[rank]
    found = []
    for collective in data.table.collectives(place):
        operation, key = job.kinds[collective[0]]
        if synchronising(operation):
            group = data.groups.get(key)
            found.append((group.global_ranks if group is not None else (), collective))
    return found


def _size(count: int) -> int:
    return max(1, min(BLOCK, count // BLOCKS_MIN))


def _spread(steps: Sequence[int], size: int, count_max: int) -> list[int]:
    """Whole blocks, at most `count_max` steps, evenly spread and with the newest; all of them where they fit."""
    blocks = len(steps) // size
    allowed = max(1, count_max // size)
    steps = steps[len(steps) - blocks * size :]
    stride = -(-blocks // allowed) if blocks else 1
    first = (blocks - 1) % stride if blocks else 0
    return [step for block in range(first, blocks, stride) for step in steps[block * size : (block + 1) * size]]


def _blocks(
    steps: Sequence[int], size: int, names: Sequence[str], values: Callable[[str], Sequence[Sequence[float]]]
) -> Blocks:
    begins = range(0, len(steps), size)
    columns = {
        name: tuple(tuple(sum(row[begin : begin + size]) / size for begin in begins) for row in values(name))
        for name in names
    }
    return Blocks(size, tuple(steps[begin] for begin in begins), columns)
