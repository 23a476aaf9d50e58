"""Checkpoints of a job with missing ranks: what each rank has recorded of its seats, as the complete job has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from lastgasp.adapter import torch as shared
from lastgasp_transformers.losses import Found, OfSeat, found_in

SHARES = "shares"
"""In the record of a checkpoint: the seats of each rank, where ranks were missing."""
LOST = (
    "{lost} lost what they alone had: their random state and their sum of the losses since the last log go on as those "
    "of rank {other}"
)


def by_seat(record: dict[str, Any], by_rank: tuple[str, ...]) -> dict[str, Any]:
    """The record as the complete job would have it: what there was by rank, by seat.

    Args:
        record: of a checkpoint; by_rank: its names of values by rank, besides `small`.
    """
    if not (shares := record.get(SHARES)):
        return record
    complete, found = sum(map(len, shares)), {name: value for name, value in record.items() if name != SHARES}
    small: dict[int, bytes] = {}
    for rank, data in record["small"].items():
        if data:
            small.update(_apart(data, shares[rank], complete / len(shares)))
    for name in by_rank:
        found[name] = {seat: value for rank, value in record.get(name, {}).items() for seat in shares[rank]}
    return found | {"small": small, "world_size": complete}


def _apart(data: bytes, seats: list[int], part: float) -> Iterator[tuple[int, bytes]]:
    """Its losses are cut evenly: how they add up alone is known."""
    own, random = found_in(shared.extra_of(data)), shared.random_of(data)
    held = {**own.others, own.seat: OfSeat(random, own.data)}
    loss, flos = own.loss * part / len(seats), own.flos / len(seats)
    for seat in seats:
        extra = msgspec.msgpack.encode(Found(loss, flos, held[seat].data, lacking=own.lacking))
        yield seat, shared.with_random(data, held[seat].random, extra)


def filled(record: dict[str, Any]) -> str:
    """Give ranks whose state was lost that of another one, which had the same seed. Returns what to note of it."""
    small = record["small"]
    lost = [rank for rank in range(record["world_size"]) if not small.get(rank)]
    if not lost:
        return ""
    data = small[other := min(rank for rank, data in small.items() if data)]
    own = found_in(shared.extra_of(data))
    if own.data is not None:  # of other indices: nothing is compared
        start = dataclasses.replace(own.data.start, digest=b"", digests=[])
        own.data = msgspec.structs.replace(own.data, start=start)
    whole = shared.with_random(data, shared.random_of(data), msgspec.msgpack.encode(own))
    small.update(dict.fromkeys(lost, whole))
    return LOST.format(lost=f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}", other=other)
