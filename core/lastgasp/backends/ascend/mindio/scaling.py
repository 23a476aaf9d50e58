"""What MindIO's elastic orders say, checked (docs/facts/mindio_tft.md §7.4)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from lastgasp.errors import NotSaveable
from lastgasp.topology import Place

PARAMETER, BY_REPLICAS = "scale-in-strategy", "DP"
"""ClusterD's, and the only one that it has."""


def scaled_in(world: Iterable[int], dp: Iterable[int], parameter: str, place: Place) -> tuple[int, ...]:
    """The ranks that go on, in the order of their new numbers.

    Args:
        world, dp, parameter: MindIO's arguments `new_world_ranks`, `new_dp_ranks` and `zit_param`.
        place: of this rank, in the complete job.

    Raises:
        NotSaveable: this rank cannot do what is ordered; a dump may follow.
    """
    strategy = _strategy(parameter)
    if strategy != BY_REPLICAS:
        raise NotSaveable(f"{PARAMETER}={strategy!r} is not known; {BY_REPLICAS!r} is")
    members, own = tuple(sorted({int(rank) for rank in world})), {int(rank) for rank in dp}
    if not members or members[0] != 0 or members[-1] >= place.world_size or len(members) == place.world_size:
        raise NotSaveable(f"of ranks 0 to {place.world_size - 1} those of {members} are to go on alone")
    if place.rank not in members:
        raise NotSaveable(f"rank {place.rank} is not among those that go on: {members}")
    if own != set(members):
        raise NotSaveable(f"ranks {sorted(own)} share this rank's data, and {members} go on: every rank must hold all")
    return members


def _strategy(parameter: str) -> object:
    try:
        found = json.loads(parameter)
    except ValueError as error:
        raise NotSaveable(f"the parameter {parameter!r} of MindX's strategy cannot be read: {error}") from error
    return found.get(PARAMETER) if isinstance(found, dict) else found
