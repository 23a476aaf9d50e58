"""What all ranks have to know before the first update, through the store of their process group.

A collective would hang for good where one rank never comes, such as one whose environment lacks this package.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from lastgasp_mindio.shards import Info

WAIT = 300.0
"""Seconds between the first rank's update and the last one's, as in a gather of the engine's."""
MARGIN = 30.0
"""Seconds more for rank 0 to say who did not come."""
_FIRST, _LAST = 0.005, 0.25
"""Seconds between two questions whether another rank has come."""


class NotThere(ValueError):
    """A rank does not take part."""


def infos_of_all(info: Info | None, place: tuple[int, int], training: str) -> list[Info | None]:
    """What all ranks have handed to `tft_set_optimizer_replica`. All call it in their first update.

    Args:
        place: this rank and their number; training: which one of the process group's this is.

    Raises:
        ValueError: nobody has handed anything, or there is no process group.
        NotThere: not all have called it in time. All that have called it know that.
    """
    found: Any = [info]
    rank, world_size = place
    if world_size > 1:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("torch.distributed is not initialised")
        store = PrefixStore(f"lastgasp/mindio/{training}", distributed_c10d._get_default_store())
        try:
            found = json.loads(_agreed(store, info, rank, world_size))
        except RuntimeError as error:  # torch's: the store is gone
            raise NotThere(f"the ranks could not tell one another of their replicas ({error})") from error
    if isinstance(found, str):
        raise NotThere(found)
    if found.count(None) == world_size:
        raise ValueError("tft_set_optimizer_replica was not called")
    return list(found)


def _agreed(store: Store, info: Info | None, rank: int, world_size: int) -> bytes:
    """The same for all, in JSON: everything, or who did not come. The first one to say it decides."""
    store.set(str(rank), json.dumps(info))
    if rank == 0:
        found = store.compare_set("all", "", json.dumps(_gathered(store, world_size)))
        store.set("told", "")
        return bytes(found)
    if _came(store, "told", WAIT + MARGIN):
        return bytes(store.get("all"))
    return bytes(store.compare_set("all", "", json.dumps(f"rank 0 did not come to its first update in {WAIT:g} s")))


def _gathered(store: Store, world_size: int) -> list[Any] | str:
    deadline, found = time.monotonic() + WAIT, []
    for rank in range(world_size):
        if not _came(store, str(rank), max(0.001, deadline - time.monotonic())):
            return f"rank {rank} did not come to its first update in {WAIT:g} s"
        found.append(json.loads(store.get(str(rank))))
    return found


def _came(store: Store, key: str, seconds: float) -> bool:
    """Whether it is there in time. Asks again and again: a wait would hold up all others that use this client."""
    deadline, pause = time.monotonic() + seconds, _FIRST
    while not store.check([key]):
        if (left := deadline - time.monotonic()) <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LAST)
    return True
