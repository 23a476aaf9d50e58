"""What MindIO's elastic orders say, checked (docs/facts/mindio_tft.md §7.4)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from lastgasp.errors import NotSaveable
from lastgasp.gasp.again import NEW
from lastgasp.topology import Place

IN, OUT = "scale-in-strategy", "scale-out-strategy"
BY_REPLICAS = "DP"
"""ClusterD's, and the only one that it has."""


def scaled_in(world: Iterable[int], dp: Iterable[int], parameter: str, place: Place) -> tuple[int, ...]:
    """The ranks that go on, in the order of their new numbers.

    Args:
        world, dp, parameter: MindIO's arguments `new_world_ranks`, `new_dp_ranks` and `zit_param`.
        place: of this rank, in the complete job.

    Raises:
        NotSaveable: this rank cannot do what is ordered; a dump may follow.
    """
    check_parameter(IN, parameter)
    members, own = tuple(sorted({int(rank) for rank in world})), {int(rank) for rank in dp}
    if not members or members[0] != 0 or members[-1] >= place.world_size or len(members) == place.world_size:
        raise NotSaveable(f"of ranks 0 to {place.world_size - 1} those of {members} are to go on alone")
    if place.rank not in members:
        raise NotSaveable(f"rank {place.rank} is not among those that go on: {members}")
    if own != set(members):
        raise NotSaveable(f"ranks {sorted(own)} share this rank's data, and {members} go on: every rank must hold all")
    return members


def scaled_out(returning: Iterable[int], parameter: str, there: tuple[int, ...], complete: int) -> tuple[int, ...]:
    """As `Again.members`: who is there from now on.

    Args:
        returning, parameter: MindIO's arguments `rank_list` and `zit_param`.
        there: the ranks that have gone on, by their numbers in the complete job; empty where none is missing.
        complete: how many ranks that has.

    Raises:
        NotSaveable: this rank cannot do what is ordered; a dump may follow.
    """
    check_parameter(OUT, parameter)
    ranks = {int(rank) for rank in returning}
    if not there or ranks != set(range(complete)).difference(there):
        raise NotSaveable(f"ranks {sorted(ranks)} are said to be back, and {there} of {complete} have gone on alone")
    return tuple(NEW if rank in ranks else there.index(rank) for rank in range(complete))


def check_parameter(name: str, parameter: str) -> None:
    """Raise NotSaveable unless `zit_param` names the one strategy that is known."""
    try:
        found = json.loads(parameter)
    except ValueError as error:
        raise NotSaveable(f"the parameter {parameter!r} of MindX's strategy cannot be read: {error}") from error
    strategy = found.get(name) if isinstance(found, dict) else found
    if strategy != BY_REPLICAS:
        raise NotSaveable(f"{name}={strategy!r} is not known; {BY_REPLICAS!r} is")
