"""By how much each rank exceeds the others in its own work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .robust_stats import slowdown
from .sample import Blocks, Matrix


def own_slowdown(blocks: Blocks) -> dict[str, Matrix]:
    """Excess over the other ranks, block by block: `data` and `compute`; seconds per step.

    In synchronous training all steps take as long as the slowest rank's, since the others wait for it: in DDP within
    backward, with sharded optimizers also there. So a phase only counts as far as it is not a wait for others:

    - data: as it is.
    - forward, without the collectives in it: less what the rank was ahead of the latest one when it began. DDP's
      forward waits in a broadcast of rank 0's buffers: rank 0 until the latest rank takes them.
    - backward, without the waits where its collectives are marked. Else only as far as everything up to the end of
      backward is longer as well, and with three ranks at least: a wait in it only makes up for something.
    - optimizer: less what the rank was ahead after data and forward.

    Args:
        blocks: with the columns of `sample.COLUMNS`, of two ranks at least.
    """
    get = blocks.columns.__getitem__
    data, forward, optimizer = (over_others(get(name)) for name in ("data", "forward_own", "optimizer"))
    backward, ahead = _backward(blocks), _ahead_of_latest(blocks)

    def added(d: float, f: float, b: float, o: float, waits: float) -> float:
        return _discounted(f, -waits) + b + _discounted(o, d + f)

    return {"data": data, "compute": _map(added, data, forward, backward, optimizer, ahead)}


def waits_in_forward(blocks: Blocks) -> Matrix:
    """How much of its forward pass's slowdown may be a wait for the latest rank; makes a rank late for what follows."""
    forward = over_others(blocks.columns["forward_own"])
    return _map(lambda f, waits: max(0.0, f) - max(0.0, _discounted(f, -waits)), forward, _ahead_of_latest(blocks))


def _ahead_of_latest(blocks: Blocks) -> Matrix:
    """How long before the latest rank each one begins its forward pass; all left the step before together.

    Less what nearly all others spend outside of all marks more than it does: they have waited for it there, in an
    all-reduce after the backward pass. Of two ranks it is unknown which waited, and it is kept.
    """
    get = blocks.columns.__getitem__
    before = _map(lambda period, f, b: period - f - b, get("period"), get("forward"), get("backward"))
    unmarked = _map(lambda until, d, o: until - d - o, before, get("data"), get("optimizer"))
    least = [_least_of_others(column) for column in zip(*unmarked, strict=True)]
    latest = [max(column) for column in zip(*before, strict=True)]
    return tuple(
        tuple(max(0.0, last - own - max(0.0, other - rest)) for last, own, other, rest in zip(*rows, strict=True))
        for rows in ((latest, own, least, rest) for own, rest in zip(before, unmarked, strict=True))
    )


def _least_of_others(values: Sequence[float]) -> float:
    """The least value of all but the lowest rank, ignoring a quarter of those as outliers."""
    return sorted(values)[1 + (len(values) - 2) // 4 if len(values) > 2 else 0]


def _backward(blocks: Blocks) -> Matrix:
    get = blocks.columns.__getitem__
    local, whole = get("backward_own"), get("backward")
    if not any(math.isnan(value) for row in local for value in row):
        return over_others(local)
    if len(whole) < 3:
        return _map(lambda value: 0.0, whole)
    until = _map(lambda d, f, b: d + f + b, get("data"), get("forward"), whole)
    return _map(lambda b, u: max(0.0, min(b, u)), over_others(whole), over_others(until))


def unmarked_slowdown(blocks: Blocks) -> Matrix:
    """What each rank spends outside of all marks more than the others; needs three ranks at least.

    Less what the rank was ahead in data, forward and optimizer: then it waits there for the others.
    """
    get = blocks.columns.__getitem__
    parts = [get(name) for name in ("data", "forward", "backward", "optimizer")]
    rest = over_others(_map(lambda whole, *marked: whole - sum(marked), get("period"), *parts))
    own = over_others(_map(lambda d, f, o: d + f + o, parts[0], parts[1], parts[3]))
    return _map(_discounted, rest, own)


def over_others(matrix: Matrix) -> Matrix:
    """What each rank has more than the median of the others, block by block.

    Ranks that have none of it at all are not compared: with tensor parallelism only the first rank of a group loads
    data. Theirs is 0.
    """
    present = [place for place, row in enumerate(matrix) if any(row)]
    result = [tuple(0.0 for _ in row) for row in matrix]
    if len(present) > 1:
        columns = [slowdown(values) for values in zip(*(matrix[place] for place in present), strict=True)]
        for place, row in zip(present, zip(*columns, strict=True), strict=True):
            result[place] = row
    return tuple(result)


def _discounted(value: float, before: float) -> float:
    """Reduce a positive slowdown by the rank's lead, during which it may have waited for the others; not below 0."""
    return max(min(value, 0.0), value + min(before, 0.0))


def _map(function: Callable[..., float], *matrices: Matrix) -> Matrix:
    return tuple(tuple(map(function, *rows)) for rows in zip(*matrices, strict=True))
