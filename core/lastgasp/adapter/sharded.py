"""Torch state of which each rank holds a part (`torch.distributed.fsdp.fully_shard`): docs/sharded.md.

A `ShardedSource` writes checkpoints of `torch.distributed.checkpoint` from live ranks and from arenas; a subclass says
what else is in them. Imports torch.distributed.checkpoint, so an adapter imports it once its model is known to be
sharded.
"""

from __future__ import annotations

from lastgasp.pytorch.held_shards import HeldShards
from lastgasp.pytorch.sharded import (
    Shards,
    fill,
    is_hybrid,
    is_sharded,
    let_go,
    load,
    stays_alive,
    unsupported,
    whole_parameters,
)
from lastgasp.pytorch.sharded_image import Payload
from lastgasp.pytorch.sharded_saves import ShardedGasp
from lastgasp.pytorch.sharded_source import ShardedSource, SmallState

__all__ = [
    "HeldShards",
    "Payload",
    "ShardedGasp",
    "ShardedSource",
    "Shards",
    "SmallState",
    "fill",
    "is_hybrid",
    "is_sharded",
    "let_go",
    "load",
    "stays_alive",
    "unsupported",
    "whole_parameters",
]
