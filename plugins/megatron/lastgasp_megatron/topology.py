"""Which rank holds which shard of the state.

A shard is what one rank must have for one part of the model: the place in the tensor and pipeline parallel grid and in
the expert parallel group, and with the distributed optimizer also the slice of its state. With expert parallelism there
are two optimizers, and the state of the experts' one is cut among fewer ranks: those that have the same experts. Ranks
with the same shard are replicas of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as distributed

from lastgasp.adapter import ConfigError, ReplicaGroups

INSTANCES = "--num-distributed-optimizer-instances 2"


@dataclass(frozen=True)
class Cut:
    """How one optimizer's state lies on ranks.

    Args:
        place: names the part of the model that it is of.
        part, parts: which slice, of how many; 0 of 1 where each rank has all of it.
        experts: the places in the expert parallel group whose files need it.
    """

    place: str
    part: int
    parts: int
    experts: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        """For file names."""
        return self.names[self.part]

    @property
    def names(self) -> list[str]:
        """Those of all parts, in order."""
        return [f"{self.place}-part-{part}" for part in range(self.parts)]


@dataclass(frozen=True)
class Shard:
    """What this rank holds.

    Args:
        tensor, pipeline: place in the model parallel grid.
        part, parts: which slice of the optimizer's state, of how many; 0 of 1 where each rank has all of it.
        data_ranks: global ranks of the data parallel group, in order: whose random state is saved.
        sharers: global ranks with this part of the model, in order: they load the same file.
        expert, experts: which experts of how many groups of them: place in the expert parallel group, and its size.
        expert_part, expert_parts: which slice of the state of these experts' optimizer.
        has_experts: whether this pipeline stage has any; known once the model is built.
    """

    tensor: int
    pipeline: int
    part: int
    parts: int
    data_ranks: tuple[int, ...]
    sharers: tuple[int, ...] = ()
    expert: int = 0
    experts: int = 1
    expert_part: int = 0
    expert_parts: int = 1
    has_experts: bool = True

    @property
    def key(self) -> tuple[int, ...]:
        """The same on all replicas."""
        return self.pipeline, self.tensor, self.part, self.expert, self.expert_part

    @property
    def folder(self) -> tuple[int, ...]:
        """Where its file lies: the same for all with this part of the model."""
        return self.pipeline, self.tensor, self.expert

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Those of the optimizers, in Megatron's order: all that is no expert first, then the experts of this place."""
        place = f"tensor-{self.tensor}-pipeline-{self.pipeline}"
        dense = Cut(place, self.part, self.parts, tuple(range(self.experts)))
        if self.experts == 1 or not self.has_experts:
            return (dense,)
        return dense, Cut(f"{place}-expert-{self.expert}", self.expert_part, self.expert_parts, (self.expert,))

    @property
    def writes(self) -> bool:
        """Whether the file of this part of the model is this rank's, or a replica's: it has the first slice.

        With expert parallelism that of the experts, on a stage without any, too: each place has a file of its own.
        """
        return (self.part if self.experts == 1 else self.expert_part) == 0


def shard_of(args: Any) -> Shard:
    """This rank's shard; after `initialize_megatron`. No collective."""
    from megatron.core import parallel_state

    part, parts, expert_part, expert_parts = 0, 1, 0, 1
    experts = int(parallel_state.get_expert_model_parallel_world_size())
    if getattr(args, "use_distributed_optimizer", False):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        part, parts = distributed.get_rank(group), distributed.get_world_size(group)
        if experts > 1:
            group = _with_the_same_experts(parallel_state.get_expert_data_parallel_group)
            expert_part, expert_parts = distributed.get_rank(group), distributed.get_world_size(group)
    same = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if experts > 1:
        same = parallel_state.get_expert_data_parallel_group()
    return Shard(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        part=part,
        parts=parts,
        data_ranks=tuple(distributed.get_process_group_ranks(parallel_state.get_data_parallel_group())),
        sharers=tuple(distributed.get_process_group_ranks(same)),
        expert=parallel_state.get_expert_model_parallel_rank() if experts > 1 else 0,
        experts=experts,
        expert_part=expert_part,
        expert_parts=expert_parts,
    )


def _with_the_same_experts(group: Callable[..., Any]) -> Any:
    """The ranks that share the state of the same experts; older versions have no instances of that optimizer."""
    try:
        return group(partial_expert_data_parallel=True)
    except TypeError:
        return group()


def replicas_of(args: Any) -> ReplicaGroups:
    """The holders of each shard, the same on all ranks. All ranks call it together, after `initialize_megatron`.

    Raises:
        ConfigError: a file would have two ranks that write it, or none.
    """
    found: list[Any] = [None] * distributed.get_world_size()
    mine = shard_of(args)
    distributed.all_gather_object(found, (mine.key, mine.folder, mine.writes))
    return grouped(found)


def grouped(found: list[tuple[tuple[int, ...], tuple[int, ...], bool]]) -> ReplicaGroups:
    """Ranks with equal shards, by what each said of its own: key, folder, and whether it writes that.

    Raises:
        ConfigError: a file would have two ranks that write it, or none.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, (key, _, _) in enumerate(found):
        groups.setdefault(tuple(key), []).append(rank)
    for folder in {folder for _, folder, _ in found}:
        writers = {key for key, home, writes in found if writes and home == folder}
        if len(writers) != 1:
            remedy = "Leave the options that order or cut parallel groups at their defaults."
            raise ConfigError("expert parallel groups", len(writers), "one first slice for each file", remedy)
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
    experts = int(getattr(args, "expert_model_parallel_size", 1) or 1)
    ranks = "data parallel ranks" if experts == 1 else "ranks with the same experts"
    if not getattr(args, "use_distributed_optimizer", False):
        return f"{what}. A second one of the {ranks} would hold a copy."
    if int(getattr(args, "data_parallel_size", 1)) // experts % 2:
        return f"{what}. An even number of {ranks} would allow {INSTANCES}, which keeps a second copy."
    more = shard_bytes / 2**20
    return f"{what}. {INSTANCES} would keep a second copy of each, for about {more:.4g} MiB more per rank."
