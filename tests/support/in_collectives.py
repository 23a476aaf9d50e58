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
    "all_gather": ("all_gather_single", "all_gather_into_tensor", "all_gather"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""What `fully_shard` calls them; an older torch has the second name alone, and FSDP1 the last ones."""


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
    seen, inside = list[int](), list[str]()

    def wrapped(begin: Any) -> Any:
        def begun(*args: Any, **kwargs: Any) -> Any:
            if inside:  # one of them calls the other
                return begin(*args, **kwargs)
            inside.append(begin.__name__)
            try:
                work = begin(*args, **kwargs | {"async_op": True})
            finally:
                inside.clear()
            seen.append(step())
            if seen.count(step()) == int(number):
                kit.fire_at(collective, step())
            return work if kwargs.get("async_op") else work.wait()

        return begun

    for name in NAMES[collective]:
        if hasattr(dist, name):
            setattr(dist, name, wrapped(getattr(dist, name)))
