"""Judges which ranks are slow, and why. Pure functions on frozen values; thresholds are in `slowdowns` and `saving`.

In synchronous training all ranks have the same step time, for the fast ones wait in the collective for the slow one.
So there are two indicators: local work in which a rank is slower than the others (`self_time`), and, if
communication is marked, which rank joins the collectives last (`lateness`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from .phrasing import ms, numbers, percent
from .robust_stats import median
from .sample import Blocks, Matrix, Sample
from .saving import Saving, judge_saving
from .self_time import own_slowdown, unmarked_slowdown, waits_in_forward
from .slowdowns import (
    MIN_BLOCKS,
    MIN_CERTAINTY,
    MIN_SHARE,
    MIN_STANDING_OF_MANY,
    Slowdown,
    measure,
    proven,
)
from .trends import trend
from .verdict import Cause, Slow, Verdict

MIN_STEPS = 10
"""Steps that all ranks have in common after the warm-up; with fewer no rank is judged."""
EXPLAINS = 0.5
"""Share of a rank's lateness that its data loading or computing must account for to be the cause."""
CORROBORATES = 0.3
"""Share of a rank's slowdown that the others must visibly spend waiting for it to be mentioned. A smaller share proves
nothing: DDP's own all-reduces may be unmarked and hide it."""
CAP_OF_TWO = 0.7
"""Confidence at most with two ranks."""
CAP_OF_GROUP = 0.6
"""The same where several members of a group that waits within forward look slow, and collectives are not marked."""
WILD = 10.0
"""More standard deviations do not increase the confidence."""


def judge(samples: Sequence[Sample], savings: Sequence[Saving]) -> Verdict:
    """The verdict on a job.

    Args:
        samples: ranks that do the same work, side by side (`sample.samples`).
        savings: per rank, its saves.
    """
    slow: list[Slow] = []
    notes: list[str] = []
    unjudged: list[str] = []
    for sample in samples:
        why = _why_not(sample)
        unjudged += why
        if sample.count >= MIN_STEPS:
            notes += trend(sample.own)
        if len(sample.ranks) > 1 and sample.count >= MIN_STEPS:
            named, past = _slow(sample)
            slow += named
            notes += [*past, *_hints(sample)]
    measured = any(sample.count >= MIN_STEPS for sample in samples)
    usual = max((sample.usual for sample in samples), default=0.0)
    saving, saving_notes = judge_saving(savings if measured else (), usual)
    slow += [_hedged_saving(item, samples, savings) for item in saving]
    alone = len(samples) == 1 and not samples[0].left_out
    enough = [sample for sample in samples if sample.count >= MIN_STEPS and (len(sample.ranks) > 1 or alone)]
    counted = enough or [sample for sample in samples if sample.count]
    return Verdict(
        tuple(sorted(slow, key=lambda item: (-item.confidence, item.rank))),
        (*notes, *saving_notes),
        tuple(unjudged),
        sum(len(sample.ranks) for sample in enough),
        min((sample.count for sample in counted), default=0),
        min((sample.first for sample in counted), default=0),
        max((sample.last for sample in counted), default=0),
    )


def _hedged_saving(slow: Slow, samples: Sequence[Sample], savings: Sequence[Saving]) -> Slow:
    """Say so where it was mostly an earlier process, perhaps on another host, that saved slowly."""
    steps = [save[0] for saving in savings if saving.rank == slow.rank for save in saving.saves]
    added = [
        f"most of these saves are of an earlier process; {_newest_process(sample, slow.rank)}"
        for sample in samples
        if slow.rank in sample.renewed and 2 * sum(step >= sample.renewed[slow.rank][0] for step in steps) < len(steps)
    ]
    return msgspec.structs.replace(slow, evidence=(*slow.evidence, *added))


def _why_not(sample: Sample) -> list[str]:
    found = [
        f"rank {rank} has too few of the steps that the others have, and is left out; its newest one is {newest}"
        for rank, newest in sample.left_out.items()
    ]
    names = numbers(sample.ranks) if sample.ranks else "all ranks"
    if sample.count < MIN_STEPS:
        found.append(f"{names}: {sample.count} steps in common after the warm-up; {MIN_STEPS} are needed to judge")
    elif len(sample.ranks) == 1:
        found.append(f"{names} has no other rank to be compared with: only its saves and its own past are judged")
    elif len(sample.ranks) == 2:
        found.append(f"{names}: of two ranks neither is known to be normal; only large differences are reported")
    if len(sample.ranks) > 1 and sample.count >= MIN_STEPS and sample.late is None:
        some = 0 < len(sample.communicate) < len(sample.ranks)
        marked = f"marked on {numbers(sample.communicate)} only" if some else "not marked"
        found.append(
            f"{names}: communication is {marked}; a delay before a collective in forward or backward, or outside of "
            "all marks, may stay hidden (lastgasp switch comm=on)"
        )
    return found


def _slow(sample: Sample) -> tuple[list[Slow], list[str]]:
    """Slow ranks, and notes about those that were slow in an earlier process."""
    usual, ranks = sample.usual, sample.ranks
    own = own_slowdown(sample.own)
    found: dict[Cause, list[Slowdown]] = {"data": measure(own["data"], ranks, usual)}
    found["compute"] = measure(own["compute"], ranks, usual)
    if sample.late is not None and len(sample.late) >= MIN_BLOCKS:
        found["communication"] = measure(sample.late.columns["late"], ranks, usual)
    accepted = {cause: _accepted(items) for cause, items in found.items()}
    named = sorted(set().union(*accepted.values()))
    slow = [slow for rank in named if (slow := _of_rank(sample, rank, found, accepted)) is not None]
    excess = {cause: (sample.own, own[cause]) for cause in own}
    if sample.late is not None:
        excess["communication"] = sample.late, sample.late.columns["late"]
    past = [item for item in slow if _is_past(sample, item.rank, *excess[item.cause])]
    now = [item for item in slow if item not in past]
    return [_hedged(sample, item, now) for item in now], [_of_past(sample, item) for item in past]


def _is_past(sample: Sample, rank: int, blocks: Blocks, excess: Matrix) -> bool:
    """Whether the rank's newest process, which may be on another host, is not slow."""
    since = _of_newest(sample, rank, blocks)
    row = excess[sample.ranks.index(rank)][since:]
    return since > 0 and len(row) * blocks.size >= MIN_STEPS and median(row) < MIN_SHARE * sample.usual


def _of_newest(sample: Sample, rank: int, blocks: Blocks) -> int:
    """Place of the first block that is all of the rank's newest process; 0 where every block is."""
    return bisect_left(blocks.steps, sample.renewed[rank][0]) if rank in sample.renewed else 0


def _of_past(sample: Sample, slow: Slow) -> str:
    return (
        f"rank {slow.rank} was slow (cause {slow.cause}, {ms(slow.lost_s)} per step) in an earlier process; "
        f"{_newest_process(sample, slow.rank)}, which is not"
    )


def _newest_process(sample: Sample, rank: int) -> str:
    step, host = sample.renewed[rank]
    return f"since step {step} it is a new one" + (f" on {host}" if host else "")


def _hedged(sample: Sample, slow: Slow, everybody: Sequence[Slow]) -> Slow:
    """With what the evidence cannot tell."""
    added, confidence = [], slow.confidence
    blocks = sample.late if slow.cause == "communication" and sample.late is not None else sample.own
    newest = (len(blocks) - _of_newest(sample, slow.rank, blocks)) * blocks.size
    if slow.rank in sample.renewed and newest < MIN_STEPS:
        added.append(f"nearly all of these steps are of an earlier process; {_newest_process(sample, slow.rank)}")
    group = set(sample.partners.get(slow.rank, ())) & {item.rank for item in everybody}
    if slow.cause == "compute" and len(group) > 1 and sample.late is None:
        confidence = min(confidence, CAP_OF_GROUP)
        added.append(
            f"{numbers(sorted(group))} are of one parallel group and wait for each other within forward and backward: "
            "some of them may only wait; lastgasp switch comm=on tells who"
        )
    return msgspec.structs.replace(slow, confidence=confidence, evidence=(*slow.evidence, *added))


def _accepted(found: Sequence[Slowdown]) -> set[int]:
    """Ranks reported for this. If several are slow, each stands out less; if most are, none is reported."""
    ranks = len(found)
    wide = {item.rank for item in found if proven(item, ranks, others=1)}
    if len(wide) > 1:
        return wide if 2 * len(wide) <= ranks else set()
    return {item.rank for item in found if proven(item, ranks)}


def _of_rank(
    sample: Sample, rank: int, found: Mapping[Cause, Sequence[Slowdown]], accepted: Mapping[Cause, set[int]]
) -> Slow | None:
    """None: it is late because it saves, which `saving` judges, or because it had to wait for another rank before."""
    mine = {cause: items[sample.ranks.index(rank)] for cause, items in found.items()}
    late = mine.get("communication")
    own: Cause = "data" if mine["data"].seconds >= mine["compute"].seconds else "compute"
    is_late = rank in accepted.get("communication", ())
    if late is not None and is_late and mine[own].seconds < EXPLAINS * late.seconds:
        place = sample.ranks.index(rank)
        waited = median(waits_in_forward(sample.own)[place])
        if max(sample.saves[place], waited) >= EXPLAINS * late.seconds:
            return None
        explained = sum(max(0.0, mine[cause].seconds) for cause in ("data", "compute"))
        return _named_slow(sample, "communication", late, late.seconds - explained, _of_lateness(late, mine[own]))
    if not is_late and rank not in accepted[own]:
        own = "compute" if own == "data" else "data"
    evidence = [*_of_own(sample, own, mine[own]), *_of_waiting(sample, mine[own], late)]
    return _named_slow(sample, own, mine[own], mine[own].seconds, evidence)


def _named_slow(sample: Sample, cause: Cause, found: Slowdown, lost: float, evidence: Sequence[str]) -> Slow:
    blocks = sample.late if cause == "communication" and sample.late is not None else sample.own
    since = blocks.steps[found.since] if found.since else None
    confidence = min(confidence_of(found), CAP_OF_TWO if len(sample.ranks) == 2 else 1.0)
    above = f"{found.single:.1f}" if found.single < WILD else f"more than {WILD:.0f}"
    chance = (
        f"slowest of {len(sample.ranks)} in {percent(found.largest)} of {found.blocks} blocks of {blocks.size} steps; "
        f"{above} standard deviations of a block above the others"
    )
    return Slow(found.rank, cause, round(confidence, 2), lost, lost / sample.usual, since, (*evidence, chance))


def confidence_of(found: Slowdown) -> float:
    """0.5 at the thresholds, towards 0.95 where all evidence is far beyond them."""
    strength = (found.share - MIN_SHARE) / (3 * MIN_SHARE)
    clarity = (found.standing - MIN_STANDING_OF_MANY) / (1 - MIN_STANDING_OF_MANY)
    certainty = (found.certainty - MIN_CERTAINTY) / (4 * MIN_CERTAINTY)
    return 0.5 + 0.15 * sum(min(1.0, max(0.0, part)) for part in (strength, clarity, certainty))


_PHASES = {"forward_own": "forward", "backward": "backward", "optimizer": "optimizer"}


def _of_own(sample: Sample, cause: Cause, found: Slowdown) -> list[str]:
    if cause == "data":
        mine, others = _usual_of(sample, "data", found)
        return [f"waits {ms(mine)} per step for data, the others {ms(others)}"]
    parts = [(name, *_usual_of(sample, column, found)) for column, name in _PHASES.items()]
    longer = [f"{name} {ms(mine)}, the others {ms(others)}" for name, mine, others in parts if mine > others]
    return [f"computes {ms(found.seconds)} longer per step" + (f": {'; '.join(longer)}" if longer else "")]


def _usual_of(sample: Sample, column: str, found: Slowdown) -> tuple[float, float]:
    """Median seconds per step of the rank and of the others, since it is slow."""
    rows = [median(row[found.since :]) for row in sample.own.columns[column]]
    place = sample.ranks.index(found.rank)
    return rows[place], median([row for at, row in enumerate(rows) if at != place])


def _of_lateness(late: Slowdown, own: Slowdown) -> list[str]:
    return [
        f"comes {ms(late.seconds)} later per step to its collectives than the others, which wait for it",
        f"data and computing explain {ms(max(0.0, own.seconds))} of it: the rest passes outside of all marks",
    ]


def _of_waiting(sample: Sample, own: Slowdown, late: Slowdown | None) -> list[str]:
    if late is not None and late.seconds >= CORROBORATES * own.seconds:
        return [f"the others wait {ms(late.seconds)} per step for it in marked collectives"]
    mine, others = _usual_of(sample, "backward", own)
    if others - mine >= CORROBORATES * own.seconds:
        return [f"the others wait for it: their backward takes {ms(others)}, its own {ms(mine)}"]
    return []


def _hints(sample: Sample) -> list[str]:
    """Ranks that lose time outside of all marks while collectives are unmarked: a hint where to look, not a verdict."""
    if sample.late is not None or len(sample.ranks) < 3:
        return []
    unmarked = unmarked_slowdown(sample.own)
    found = measure(unmarked, sample.ranks, sample.usual)
    return [
        f"rank {item.rank} spends {ms(item.seconds)} per step more than the others outside of all marks, and the "
        "others seem to wait for it; with communication marks it can be judged: lastgasp switch comm=on"
        for item in found
        if item.rank in _accepted(found) and not _is_past(sample, item.rank, sample.own, unmarked)
    ]
