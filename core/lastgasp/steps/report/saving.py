"""Whether saving checkpoints slows the job down, and on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .job import RankData
from .phrasing import ms, numbers, percent
from .robust_stats import change_point, median
from .table import Save
from .verdict import Slow

MIN_SHARE = 0.20
"""Share of the job's wall time that saving must take to be reported, if one rank saves and none is comparable.
A fifth: a job that saves reasonably often spends some percent."""
MIN_STEPS_LONG = 3.0
"""A single save must take so many steps as well: a tiny one at every step is intended."""
MIN_EXCESS, MIN_RATIO = 0.10, 1.5
"""Where several ranks save: share of the wall time that one takes longer, and how many times as long its saves are."""
GROWTH, MIN_GROWN = 2.0, 0.05
"""Against its own past: saves take so many times as long since some step, and this share of the wall time more."""
MIN_SAVES, MIN_SAVES_OF_PAST = 2, 8


@dataclass(frozen=True)
class Saving:
    """The saves of one rank in the time that is looked at.

    Attributes:
        rank: who.
        saves: step, begin (ns since the epoch) and seconds of each.
        wall: seconds from the begin of the first step to the end of the last one, or of the last save.
    """

    rank: int
    saves: tuple[Save, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """Of all saves."""
        return sum(save[2] for save in self.saves)


def saving_of(data: RankData, last: int | None = None) -> Saving:
    """The saves of the rank; of its newest steps only where `last` is given."""
    table = data.table
    if not len(table):
        return Saving(data.rank, (), 0.0)
    begin = table.begins[max(0, len(table) - last) if last is not None else 0]
    saves = tuple(save for save in table.saves if save[1] >= begin)
    end = max([table.ends[len(table) - 1], *(at + int(seconds * 1e9) for _, at, seconds in saves)])
    return Saving(data.rank, saves, (end - begin) * 1e-9)


def judge_saving(savings: Sequence[Saving], usual: float) -> tuple[list[Slow], list[str]]:
    """Return slow ranks, and notes about no particular rank.

    Args:
        savings: of all ranks.
        usual: seconds of a step.
    """
    savers = [saving for saving in savings if len(saving.saves) >= MIN_SAVES and saving.wall > 0]
    if usual <= 0:
        return [], []
    slow, notes = [], []
    if len(savers) == 1:
        slow = _alone(savers[0], usual)
    elif savers:
        slow = [found for saving in savers for found in _among(saving, savers)]
    named = {item.rank for item in slow}
    slow += [found for saving in savers if saving.rank not in named for found in _own_past(saving, usual)]
    share = median([saving.seconds / saving.wall for saving in savers]) if savers else 0.0
    if not slow and share >= MIN_SHARE:
        notes.append(f"saving takes {percent(share)} of the time on {numbers([saving.rank for saving in savers])}")
    return slow, notes


def _alone(saving: Saving, usual: float) -> list[Slow]:
    share, single = saving.seconds / saving.wall, median([save[2] for save in saving.saves])
    if share < MIN_SHARE or single < MIN_STEPS_LONG * usual:
        return []
    evidence = (
        f"saving takes {percent(share)} of the time: {len(saving.saves)} saves of {ms(single)} (median), "
        f"{single / usual:.0f} steps long each",
        "no other rank saves, so it is not compared with others",
    )
    return [_slow(saving.rank, single, share, 0.5 + 0.9 * (share - MIN_SHARE), evidence)]


def _among(saving: Saving, savers: Sequence[Saving]) -> list[Slow]:
    mine = median([save[2] for save in saving.saves])
    others = median([save[2] for other in savers if other is not saving for save in other.saves])
    share = (mine - others) * len(saving.saves) / saving.wall
    if share < MIN_EXCESS or mine < MIN_RATIO * others:
        return []
    evidence = (f"its saves take {ms(mine)}, those of the other ranks {ms(others)} (medians of {len(saving.saves)})",)
    return [_slow(saving.rank, mine - others, share, 0.6 + (share - MIN_EXCESS), evidence)]


def _own_past(saving: Saving, usual: float) -> list[Slow]:
    seconds = [save[2] for save in saving.saves]
    place = change_point(seconds, 3) if len(seconds) >= MIN_SAVES_OF_PAST else None
    if place is None:
        return []
    before, after = median(seconds[:place]), median(seconds[place:])
    wall = saving.wall - (saving.saves[place][1] - saving.saves[0][1]) * 1e-9
    share = (after - before) * (len(seconds) - place) / max(wall, 1e-9)
    apart = min(seconds[place:]) > max(seconds[:place])
    if after < GROWTH * before or share < MIN_GROWN or not apart or after < usual:
        return []
    evidence = (f"its saves take {ms(after)} (median), before {ms(before)}",)
    slow = _slow(saving.rank, after - before, share, 0.6 + share, evidence)
    return [msgspec.structs.replace(slow, since_step=saving.saves[place][0])]


def _slow(rank: int, lost: float, share: float, confidence: float, evidence: tuple[str, ...]) -> Slow:
    return Slow(rank, "checkpoint", round(min(0.95, confidence), 2), lost, share, None, evidence)
