"""Ranks and nodes of a plain PyTorch job, and how its ranks reach the controller."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lastgasp.connect import contact_of, place_in_job
from lastgasp.errors import ConfigError, ControlError, DeadlineExceeded
from lastgasp.events import FaultKind
from lastgasp.pytorch import exception_origin
from lastgasp.session import Contact
from lastgasp.topology import Place, ReplicaGroups, data_parallel

T = TypeVar("T")


def place_of(groups: Callable[[int], ReplicaGroups] = data_parallel) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0.

    Args:
        groups: which ranks of a job of that size should hold the same.

    Raises:
        ConfigError: there are several processes and no process group yet.
    """
    if _grouped():
        size = dist.get_world_size()
        return place_in_job(dist.get_rank(), size, groups(size), from_rank_0)
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if size > 1:
        raise ConfigError("WORLD_SIZE", size, "1 if torch.distributed is not initialised",
                          "Open the session after torch.distributed.init_process_group().")  # fmt: skip
    return place_in_job(0, 1, data_parallel(1), from_rank_0)


def connect(place: Place) -> Contact | None:
    """The launcher's controller, or one that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes, and where the controller may listen is not configured.
        ControlError, DeadlineExceeded: it could not be started.
    """
    size = local(place)[1]
    several = f"this job has {place.world_size} ranks, {size} of them on this node"
    return contact_of(place, several if size < place.world_size else "", from_rank_0)


def local(place: Place) -> tuple[int, int]:
    """This rank's number among those of its node, and their count."""
    env = os.environ
    size = int(env.get("LOCAL_WORLD_SIZE") or place.world_size)
    return int(env.get("LOCAL_RANK") or place.rank % size), size


def versions() -> dict[str, str]:
    """What this worker runs, for the table of `lastgasp ps`."""
    return {"torch": torch.__version__}


def from_rank_0(value: T) -> T:
    """Rank 0's value on all ranks."""
    if not _grouped() or dist.get_world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    found: T = box[0]
    return found


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def kind_of(error: BaseException) -> FaultKind:
    """As for any exception of torch's; a lost controller or rank while a periodic checkpoint was agreed on, too."""
    return "peer" if isinstance(error, ControlError | DeadlineExceeded) else exception_origin.kind_of(error)
