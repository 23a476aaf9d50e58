"""Detects whether all ranks together have become slower or faster, which concerns no single rank."""

from __future__ import annotations

from .phrasing import ms
from .robust_stats import change_point, median, scale
from .sample import Blocks
from .slowdowns import MIN_BLOCKS

GROWTH = 1.25
"""Times as long: neighbours on a shared machine move a job's steps by some ten percent for minutes."""
MIN_SINGLE = 3.0
"""The change in standard deviations of a block, on either side."""
_NAMES = {"data": "waiting for data", "forward": "forward", "backward": "backward", "optimizer": "the optimizer"}


def trend(blocks: Blocks) -> list[str]:
    """A sentence where the steps of all ranks changed their level for good; else nothing."""
    series = [median(values) for values in zip(*blocks.columns["period"], strict=True)]
    place = change_point(series, max(MIN_BLOCKS, len(series) // 10))
    if place is None:
        return []
    before, after = series[:place], series[place:]
    was, now = median(before), median(after)
    if max(was, now) < GROWTH * min(was, now) or abs(now - was) < MIN_SINGLE * max(scale(before), scale(after)):
        return []
    part = _part(blocks, place, 1 if now > was else -1)
    return [f"since step {blocks.steps[place]} a step takes {ms(now)} on all ranks, before {ms(was)}{part}"]


def _part(blocks: Blocks, place: int, sign: int) -> str:
    changes = {}
    for column, name in _NAMES.items():
        series = [median(values) for values in zip(*blocks.columns[column], strict=True)]
        changes[name] = sign * (median(series[place:]) - median(series[:place]))
    name = max(changes, key=changes.__getitem__)
    return f"; most of it is {name} ({ms(sign * changes[name])})" if changes[name] > 0 else ""
