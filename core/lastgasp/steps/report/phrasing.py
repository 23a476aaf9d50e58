"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from .verdict import Slow, Verdict


def ms(seconds: float) -> str:
    """A duration with a unit that fits: `12.3 ms`, `4.56 s`, `0.8 ms`."""
    value = abs(seconds)
    if value >= 100:
        return f"{seconds:.0f} s"
    if value >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.{0 if value >= 0.1 else 1 if value >= 0.001 else 2}f} ms"


def percent(share: float) -> str:
    """Format `12 %`, or `0.4 %` if it is small."""
    return f"{share * 100:.{0 if share >= 0.1 or share == 0 else 1}f} %"


_MEANING = {
    "data": "waits for its data",
    "compute": "computes longer",
    "communication": "comes late to collectives",
}


def headline(slow: Slow) -> str:
    """`rank 2 waits for its data: 20.1 ms per step more than the others, 36 % of a step, since step 120`."""
    since = f", since step {slow.since_step}" if slow.since_step is not None else ""
    if slow.cause == "checkpoint":
        return f"rank {slow.rank} saves slowly: {ms(slow.lost_s)} a save, {percent(slow.lost_share)} of the time{since}"
    return (
        f"rank {slow.rank} {_MEANING[slow.cause]}: {ms(slow.lost_s)} per step more than the others, "
        f"{percent(slow.lost_share)} of a step{since}"
    )


def conclusion(verdict: Verdict, ranks: int) -> str:
    """Summarise the job in one line."""
    if verdict.slow:
        slow = sorted({item.rank for item in verdict.slow})
        return f"Slow: {numbers(slow)} of {ranks}."
    if not verdict.judged:
        return "Nobody was judged."
    steps = f"{verdict.steps:,} steps ({verdict.first} to {verdict.last})"
    if ranks == 1:
        return f"Nothing is wrong to see in {steps}."
    judged = f"{ranks}" if verdict.judged == ranks else f"{verdict.judged} of {ranks}"
    return f"Nobody is slow: {judged} ranks over {steps}."


def numbers(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    parts, first = [], 0
    ordered = sorted(ranks)
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            low, high = ordered[first], ordered[place - 1]
            parts.append(f"{low}" if low == high else f"{low}-{high}")
            first = place
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(parts)}"
