"""A fault inside of a collective of `fully_shard` or FSDP1: this rank has begun it, and no rank has its result.

IN_COLLECTIVE="sigkill,1,5,all_gather,2" kills rank 1 in the second all-gather of the step that follows step 5.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastgasp.config import attempt_in
from lastgasp.testing.faults import ENV_LOG, FaultKit, FaultSpec

VARIABLE = "IN_COLLECTIVE"
NAMES = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""What `fully_shard` calls them; an older torch has the second name alone."""


def install(rank: int, step: Callable[[], int]) -> None:
    """Have the fault that was asked for, if any, in the first attempt of the job.

    Args:
        step: completed ones.
    """
    if not (wanted := os.environ.get(VARIABLE)):
        return
    import torch.distributed as dist

    kind, where, at, collective, number = wanted.split(",")
    spec = FaultSpec(kind=kind, rank=int(where), step=int(at), phase=collective)
    kit = FaultKit((spec,), rank, attempt_in(os.environ), Path(os.environ[ENV_LOG]))
    name = next(name for name in NAMES[collective] if hasattr(dist, name))
    begin: Any = getattr(dist, name)
    seen = list[int]()

    def begun(*args: Any, **kwargs: Any) -> Any:
        work = begin(*args, **kwargs | {"async_op": True})
        seen.append(step())
        if seen.count(step()) == int(number):
            kit.fire_at(collective, step())
        if kwargs.get("async_op"):
            return work
        return work.wait()

    setattr(dist, name, begun)
