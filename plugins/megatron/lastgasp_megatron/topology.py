"""Which rank holds which shard of the state.

A shard is what one rank must have for one part of the model: the place in the tensor and pipeline parallel grid,
and with the distributed optimizer also the slice of its state. Ranks with the same shard are replicas of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as distributed

from lastgasp.adapter import ReplicaGroups

INSTANCES = "--num-distributed-optimizer-instances 2"


@dataclass(frozen=True)
class Shard:
    """What this rank holds.

    Args:
        tensor, pipeline: place in the model parallel grid.
        part, parts: which slice of the optimizer's state, of how many; 0 of 1 where each rank has all of it.
        data_ranks: global ranks of the data parallel group, in order: whose random state is saved.
    """

    tensor: int
    pipeline: int
    part: int
    parts: int
    data_ranks: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int, int]:
        """The same on all replicas."""
        return self.pipeline, self.tensor, self.part

    @property
    def name(self) -> str:
        """For file names."""
        return self.names[self.part]

    @property
    def names(self) -> list[str]:
        """Those of all parts at this place of the grid, in order."""
        return [f"tensor-{self.tensor}-pipeline-{self.pipeline}-part-{part}" for part in range(self.parts)]


def shard_of(args: Any) -> Shard:
    """This rank's shard; after `initialize_megatron`. No collective."""
    from megatron.core import parallel_state

    part, parts = 0, 1
    if getattr(args, "use_distributed_optimizer", False):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        part, parts = distributed.get_rank(group), distributed.get_world_size(group)
    return Shard(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        part=part,
        parts=parts,
        data_ranks=tuple(distributed.get_process_group_ranks(parallel_state.get_data_parallel_group())),
    )


def replicas_of(args: Any) -> ReplicaGroups:
    """The holders of each shard, the same on all ranks. All ranks call it together, after `initialize_megatron`."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, shard_of(args).key)
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, key in enumerate(found):
        groups.setdefault(tuple(key), []).append(rank)
    return tuple(tuple(groups[key]) for key in sorted(groups))


def advice(replicas: ReplicaGroups, args: Any, shard_bytes: int, off: bool = False) -> str:
    """What would keep a lost rank's shard, and what it costs; empty where every shard has a replica.

    Args:
        shard_bytes: bytes of optimizer state that this rank holds, fp32 weights included.
        off: the user wanted no arenas.
    """
    unreplicated = sum(len(group) == 1 for group in replicas)  # with their ranks they are lost
    if not unreplicated:
        return ""
    what = f"{unreplicated} of {len(replicas)} shards of the state are on one rank only, and are lost with it"
    if off:
        what += ", since --lastgasp-arena is off: else a copy of each is kept in its host's memory"
    data = int(getattr(args, "data_parallel_size", 1))
    if not getattr(args, "use_distributed_optimizer", False):
        return f"{what}. A second data parallel rank would hold a copy."
    if data % 2:
        return f"{what}. An even number of data parallel ranks would allow {INSTANCES}, which keeps a second copy."
    more = shard_bytes / 2**20
    return f"{what}. {INSTANCES} would keep a second copy of each, for about {more:.4g} MiB more per rank."
