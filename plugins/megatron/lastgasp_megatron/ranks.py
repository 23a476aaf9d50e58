"""Who is who in this job, and how its ranks reach the controller."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from lastgasp.connect import contact_of, place_in_job
from lastgasp.session import Contact
from lastgasp.topology import Place, ReplicaGroups

T = TypeVar("T")

OLDEST, NEWEST = (0, 12, 1), (0, 19, 2)
"""Versions of megatron-core that this was written for, both included."""


def place_of(replicas: ReplicaGroups) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0."""
    return place_in_job(distributed.get_rank(), distributed.get_world_size(), replicas, _from_rank_0)


def connect(place: Place) -> Contact | None:
    """The launcher's controller, or one of our own that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes and nobody said where the controller may listen.
        ControlError, DeadlineExceeded: it could not be started.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or place.world_size)
    several = f"this job has {place.world_size} ranks, {local} of them on this node"
    return contact_of(place, several if local < place.world_size else "", _from_rank_0)


def device() -> torch.device:
    """Where Megatron puts this rank's tensors."""
    for kind in ("npu", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.empty(0, device=kind).device  # what a shim answers, too
    return torch.device("cpu")


def versions() -> dict[str, str]:
    """What this worker runs, for the job's table of workers."""
    found = {"megatron-core": _version("megatron.core"), "torch": torch.__version__}
    return found | {name: _version(name) for name in ("mindspeed", "mindspeed_llm") if name in sys.modules}


def untried(version: str) -> str:
    """What to tell of a megatron-core that nobody has tried with this; empty where nothing is."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= tuple(map(int, found.groups())) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return (
        f"megatron-core {version} is not among the versions that lastgasp was tried with, {oldest} to {newest}: before "
        "you trust it, kill a rank of a short run and compare the losses, or take one of those"
    )


def _version(module: str) -> str:
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))
    except ImportError:
        return "unknown"


def _from_rank_0(value: T) -> T:
    """Rank 0's value on all ranks."""
    if distributed.get_world_size() == 1:
        return value
    box: list[Any] = [value]
    distributed.broadcast_object_list(box, src=0)
    found: T = box[0]
    return found
