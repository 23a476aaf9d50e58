"""What is sharded, who are replicas, and what cannot be described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lastgasp.errors import ConfigError
from lastgasp.pytorch.sharded.flat import Flats
from lastgasp.pytorch.sharded.names import Leaf, model_leaves
from lastgasp.pytorch.sharded.table import Chunk, Undescribable, chunk_of, local_of, shard_key, strides_of
from lastgasp.pytorch.zero import is_flat, is_zero
from lastgasp.pytorch.zero import unsupported as zero_unsupported
from lastgasp.replicas import PIPELINES, require_same_names
from lastgasp.topology import ReplicaGroups

_FULLY_SHARD = "Use torch.distributed.fsdp.fully_shard (FSDP2): each rank's part can be read without the others."
_KINDS = {
    "FullyShardedDataParallel": ("one of torch's (or fully_shard), or a model that each rank holds completely",
                                 "That of another package keeps its parts elsewhere. " + _FULLY_SHARD),
    "DeepSpeedEngine": ("a plain optimizer and a model sharded by fully_shard, or DDP",
                        "DeepSpeed keeps parts of the state in buffers of its own. " + _FULLY_SHARD),
    "PipelineModule": ("a plain optimizer and a model sharded by fully_shard, or DDP",
                       "DeepSpeed keeps parts of the state in buffers of its own. " + _FULLY_SHARD),
}  # fmt: skip


def unsupported(models: Mapping[str, nn.Module], optimizers: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """What cannot be saved by the survivors, as (what it is, what is allowed, what to do); None if everything can."""
    for model in models.values():
        for module in model.modules():
            for kind in type(module).__mro__ if not isinstance(module, FullyShardedDataParallel) else ():
                if kind.__name__ in _KINDS:
                    return (kind.__name__, *_KINDS[kind.__name__])
    whole = not any(hasattr(p, "device_mesh") for model in models.values() for p in model.parameters())
    whole = whole and not any(map(is_flat, models.values()))
    for optimizer in optimizers.values():
        if whole and is_zero(optimizer):
            if (found := zero_unsupported(optimizer)) is not None:
                return found
        elif hasattr(optimizer, "consolidate_state_dict"):
            return (type(optimizer).__name__, "an optimizer whose state lies beside its parameters",
                    "Use a plain optimizer with fully_shard: its state is sharded as the parameters are.")  # fmt: skip
    try:
        for _, leaf in _parameters(models):
            _described(leaf)
    except Undescribable as error:
        return str(error), "tensors of which each rank's part can be told", "Tell us what you use: lastgasp's issues."
    return None


def _described(leaf: Leaf) -> Chunk:
    try:
        strides_of(local_of(leaf.value))
        return leaf.chunk or chunk_of(leaf.value, _world_size())
    except Undescribable as error:
        raise Undescribable(f"{leaf.name}: {error}") from error


def is_sharded(models: Mapping[str, nn.Module]) -> bool:
    """Whether some parameter is a DTensor, or of FSDP1. To be asked where `unsupported` has returned None."""
    return any(leaf.chunk is not None or isinstance(leaf.value, DTensor) for _, leaf in _parameters(models))


def replica_groups(models: Mapping[str, nn.Module], world_size: int, replicated: bool = False) -> ReplicaGroups:
    """Which ranks hold the same parts: one group per shard. All ranks call it together (one small all-gather).

    With `fully_shard` on a mesh of one dimension each rank is alone; on two dimensions (HSDP) the ranks along the
    replicated one are a group. That they do hold the same is compared by digests, as for every replica. Equal names
    and places alone say nothing: stages of a pipeline may have them, too.

    Args:
        replicated: the user says that ranks which no mesh joins are kept equal all the same.

    Raises:
        ConfigError: ranks hold different parameters, or parts of the same ones on meshes that nothing joins.
    """
    own = _held(models, replicated)
    found = [own]
    if world_size > 1:
        gathered: list[Any] = [own] * world_size
        dist.all_gather_object(gathered, own)
        found = gathered
    require_same_names([one.names for one in found])
    groups: dict[bytes, list[int]] = {}
    for rank, one in enumerate(found):
        groups.setdefault(one.parts, []).append(rank)
    for group in groups.values():
        _require_joined(group, found)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True)
class _Held:
    """What a rank holds.

    Attributes:
        names: digest of the names and whole shapes of all parameters; parts: digest of its parts of them.
        joined: the ranks that its meshes join with it as holders of the same parts; None: any may be.
    """

    names: bytes
    parts: bytes
    joined: frozenset[int] | None


def _held(models: Mapping[str, nn.Module], replicated: bool) -> _Held:
    leaves = _parameters(models)
    chunks = [(f"{name} {leaf.name}", _described(leaf)) for name, leaf in leaves]
    names = sorted({(name, chunk.shape) for name, chunk in chunks})
    spread = [_copies(leaf.value) for (_, leaf), (_, chunk) in zip(leaves, chunks, strict=True)
              if isinstance(leaf.value, DTensor) and 0 not in chunk.sizes]  # fmt: skip
    flats = [part for model in models.values() for part in Flats(model).all()]
    spread += [part.copies for part in flats if part.count]
    joined = None if replicated or not spread else frozenset[int].intersection(*spread)
    return _Held(xxhash.xxh3_128_digest(repr(names).encode()), shard_key(chunks), joined)


def _copies(tensor: DTensor) -> frozenset[int]:
    """The ranks that hold the same part of it as this one."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    assert here is not None  # who is not in the mesh holds nothing of it
    along = tuple(slice(None) if p.is_replicate() else at for p, at in zip(tensor.placements, here, strict=True))
    return frozenset(mesh.mesh[along].flatten().tolist())


def _require_joined(group: Sequence[int], found: Sequence[_Held]) -> None:
    reached, open_ = {group[0]}, [group[0]]
    while open_:
        joined = found[open_.pop()].joined
        new = {rank for rank in group if joined is None or rank in joined} - reached
        reached |= new
        open_ += new
    if apart := set(group) - reached:
        raise ConfigError(
            "model", f"ranks {group[0]} and {min(apart)} hold parts of the same names on meshes that nothing joins",
            "one mesh for all ranks", f"{PIPELINES} with two dimensions for replicas (HSDP); or say "
            "TorchState(..., replicated=True) if your loop itself keeps those ranks equal.")  # fmt: skip


def _parameters(models: Mapping[str, nn.Module]) -> list[tuple[str, Leaf]]:
    leaves = [(name, leaf) for name, model in models.items() for leaf in model_leaves(model, "")[0]]
    return [(name, leaf) for name, leaf in leaves if not leaf.buffer]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
