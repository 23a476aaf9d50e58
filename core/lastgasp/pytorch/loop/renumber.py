"""The numbers that ranks have from now on, where some are missing or are there again (`Again.members`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from lastgasp.gasp.again import NEW, Again
from lastgasp.pytorch.loop.record import KEY
from lastgasp.topology import Place, data_parallel


def place_after(place: Place, again: Again) -> Place:
    """The place of a rank that goes on."""
    if not again.members:
        return replace(place, incarnation=again.incarnation)
    size = len(again.members)
    rank, groups = again.members.index(place.rank), data_parallel(size)
    return replace(place, rank=rank, world_size=size, replicas=groups, incarnation=again.incarnation)


def numbered(again: Again, rank: int) -> Again:
    """The order by the numbers from now on, for a rank that goes on, by its number before.

    With new processes MindIO has told it so already: to it a rank has its number in the complete job for ever.
    """
    if NEW in again.members:
        return msgspec.structs.replace(again, rank=again.numbers[rank])
    return again.for_rank(rank)


def renumbered(checkpoint: dict[str, Any], again: Again) -> dict[str, Any]:
    """The states of the ranks in a checkpoint by the numbers that they have from now on."""
    if again.members:
        record = checkpoint[KEY]
        before = record["small"]
        record["small"] = {now: before[rank] for rank, now in again.numbers.items() if rank in before}
        record["world_size"] = len(again.members)
    return checkpoint
