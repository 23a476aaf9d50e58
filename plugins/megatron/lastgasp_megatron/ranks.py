"""Who is who in this job, and how its ranks reach the controller."""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from typing import Any, TypeVar

import torch
import torch.distributed as distributed

from lastgasp.errors import ConfigError
from lastgasp.gasp.serve import start_detached
from lastgasp.session import Contact
from lastgasp.topology import Place, ReplicaGroups

T = TypeVar("T")
_LOOPBACK = "127.0.0.1"


def place_of(replicas: ReplicaGroups) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0."""
    env, size = os.environ, distributed.get_world_size()
    job = env.get("LASTGASP_JOB") or env.get("TORCHELASTIC_RUN_ID")
    attempt = int(env.get("LASTGASP_ATTEMPT") or env.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if not job:
        job = _from_rank_0(uuid.uuid4().hex[:12])
    return Place(rank=distributed.get_rank(), world_size=size, replicas=replicas, attempt=attempt, job=job)


def connect(place: Place) -> Contact | None:
    """The launcher's controller, or one of our own that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes and nobody said where the controller may listen.
        ControlError, DeadlineExceeded: it could not be started.
    """
    contact = Contact.from_environment()
    if contact is not None or place.world_size == 1:
        return contact
    bind, local = os.environ.get("LASTGASP_BIND"), int(os.environ.get("LOCAL_WORLD_SIZE") or place.world_size)
    if local < place.world_size and not bind:
        raise ConfigError(
            "LASTGASP_BIND",
            bind,
            f"the address of node 0, because this job has {place.world_size} ranks, {local} of them on this node",
            "Set it on every node to node 0's address on the training network; loopback cannot be reached.",
        )
    found = start_detached(bind or _LOOPBACK) if place.rank == 0 else None
    address, token = _from_rank_0((found.address, found.token) if found is not None else ("", ""))
    return Contact(address, token)


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
