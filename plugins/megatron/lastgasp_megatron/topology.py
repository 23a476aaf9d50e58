"""Which rank holds which shard of the state, and what this version refuses to save.

A shard is what one rank must have for one part of the model: the place in the tensor and pipeline parallel grid,
and with the distributed optimizer also the slice of its state. Ranks with the same shard are replicas of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as distributed

from lastgasp.errors import ConfigError
from lastgasp.topology import ReplicaGroups

INSTANCES = "--num-distributed-optimizer-instances 2"

# Option -> its values that are refused, and what to do. Left out in a version of Megatron that has no such option.
_REFUSED: dict[str, tuple[str, str]] = {
    "num_experts": ("no experts", "Their groups differ from the dense ones, which this version cannot save."),
    "use_megatron_fsdp": ("the default", "Use --use-distributed-optimizer."),
    "use_custom_fsdp": ("the default", "Use --use-distributed-optimizer."),
    "use_torch_fsdp2": ("the default", "Use --use-distributed-optimizer."),
    "use_layer_wise_distributed_optimizer": ("the default", "Use --optimizer adam, which does not bring it about."),
    "optimizer_cpu_offload": ("the default", "Leave it out."),
    "use_precision_aware_optimizer": ("the default", "Leave it out."),
    "fp8_param_gather": ("the default", "Leave it out."),
    "fp4_param": ("the default", "Leave it out."),
    "fp4_param_gather": ("the default", "Leave it out."),
    "optimizer_cuda_graph": ("the default", "Leave it out: nothing can look between two steps of it."),
    "overlap_param_gather_with_optimizer_step": ("the default", "Leave it out."),
    "reuse_grad_buf_for_mxfp8_param_ag": ("the default", "Leave it out."),
    # MindSpeed's. Between two steps the optimizer's tensors are of another form, or not where they seem to be.
    "reuse_fp32_param": ("the default", "Leave it out: between two steps it keeps no fp32 weights to save."),
    "swap_optimizer": ("the default", "Leave it out: between two steps the optimizer's state is not on the device."),
    "virtual_optimizer": ("the default", "Leave it out: nobody has shown that its state can be saved by survivors."),
    "quant_states": ("the default", "Leave it out: nobody has shown that its state can be saved by survivors."),
    "lora_target_modules": ("the default", "Leave it out: what is saved of a model with adapters is not the whole."),
    # Others that answer a fault in place of lastgasp.
    "ttp_enabled": ("lastgasp or MindSpeed's own engine, not both", "Leave one out."),
    "inprocess_restart": ("lastgasp or restarts in the process, not both", "Leave one out."),
    "no_save_optim": ("the default", "Leave it out: what is saved without the optimizer cannot be resumed."),
}
# The same for sizes: those above 1 are refused. The last two follow from options of other names.
_ONE = {
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
}


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
        return f"tensor-{self.tensor}-pipeline-{self.pipeline}-part-"


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
    """The holders of each shard, the same on all ranks. All ranks call it together, after `initialize_megatron`.

    Args:
        args: Megatron's namespace.

    Raises:
        ConfigError: an option under which the state cannot be saved by survivors alone.
    """
    refuse_unsupported(args)
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, shard_of(args).key)
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank, key in enumerate(found):
        groups.setdefault(tuple(key), []).append(rank)
    return tuple(tuple(groups[key]) for key in sorted(groups))


def refuse_unsupported(args: Any) -> None:
    """Refuse what this version cannot save.

    Raises:
        ConfigError: names the option, what is allowed, and what to do.
    """
    for name, (allowed, remedy) in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(_option(name), getattr(args, name), allowed, remedy)
    for name, option in _ONE.items():
        if (getattr(args, name, None) or 1) > 1:
            raise ConfigError(option, getattr(args, name), "1", "Leave it out, or train without lastgasp.")


def unreplicated_shards(replicas: ReplicaGroups) -> int:
    """How many shards only one rank holds: with that rank they are lost."""
    return sum(len(group) == 1 for group in replicas)


def advice(replicas: ReplicaGroups, args: Any, shard_bytes: int) -> str:
    """What would keep a lost rank's shard, and what it costs; empty where every shard has a replica.

    Args:
        shard_bytes: bytes of optimizer state that this rank holds, fp32 weights included.
    """
    unreplicated = unreplicated_shards(replicas)
    if not unreplicated:
        return ""
    what = f"{unreplicated} of {len(replicas)} shards of the state are on one rank only, and are lost with it"
    data = int(getattr(args, "data_parallel_size", 1))
    if not getattr(args, "use_distributed_optimizer", False):
        return f"{what}. A second data parallel rank would hold a copy."
    if data % 2:
        return f"{what}. An even number of data parallel ranks would allow {INSTANCES}, which keeps a second copy."
    more = shard_bytes / 2**20
    return f"{what}. {INSTANCES} would keep a second copy of each, for about {more:.4g} MiB more per rank."


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
