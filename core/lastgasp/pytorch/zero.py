"""What shards without DTensors: `torch.distributed.optim.ZeroRedundancyOptimizer`, and FSDP1 (`sharded.flat`).

With the first one each rank updates some of the parameters, and sends them to all. The state of a parameter is on one
rank alone, that of an ordinary optimizer inside. Parameters are whole on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_NAME, _FLAT = "ZeroRedundancyOptimizer", "FullyShardedDataParallel"
_REMEDY = "Leave {} out, or use fully_shard (FSDP2) with a plain optimizer."


def is_zero(optimizer: Any) -> bool:
    """Whether it is one, also of a derived class."""
    return any(kind.__name__ == _NAME for kind in type(optimizer).__mro__)


def is_flat(model: Any) -> bool:
    """Whether FSDP1 has some of a model's parameters."""
    return any(kind.__name__ == _FLAT for module in model.modules() for kind in type(module).__mro__)


def inside(optimizer: Any) -> Any:
    """The optimizer that holds this rank's state: itself, but for a `ZeroRedundancyOptimizer`."""
    return optimizer.optim if is_zero(optimizer) else optimizer


def unsupported(optimizer: Any) -> tuple[str, str, str] | None:
    """What cannot be saved by the survivors, as (what it is, what is allowed, what to do); None if everything can."""
    if optimizer._overlap_with_ddp:
        return (f"{_NAME} with overlap_with_ddp", "one whose step() is an update of its own",
                _REMEDY.format("overlap_with_ddp=True"))  # fmt: skip
    world = dist.get_world_size() if dist.is_initialized() else 1
    if dist.get_process_group_ranks(optimizer.process_group) != list(range(world)):
        return (f"{_NAME} of a process group of {optimizer.world_size} ranks", f"one of all {world} ranks, in order",
                _REMEDY.format("process_group=..."))  # fmt: skip
    return None
