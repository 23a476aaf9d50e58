"""State of which each rank holds a part: `torch.distributed.fsdp.fully_shard`, DTensors, FSDP1.

A rank's part is described by a table, read as bytes where it lies, and written by whoever has these bytes as that
rank's file of a `torch.distributed.checkpoint` directory, without a collective. Plain `dcp.load` reads that directory.
"""

from __future__ import annotations

from lastgasp.pytorch.sharded.detect import is_sharded, replica_groups, unsupported
from lastgasp.pytorch.sharded.files import file_name, write_arena, write_live
from lastgasp.pytorch.sharded.flat import is_hybrid, let_go, stays_alive
from lastgasp.pytorch.sharded.layout import LAYOUT, ShardedFiles, gasp_path, periodic_path
from lastgasp.pytorch.sharded.load import fill, load
from lastgasp.pytorch.sharded.metadata import metadata
from lastgasp.pytorch.sharded.names import whole_parameters
from lastgasp.pytorch.sharded.shards import Shards
from lastgasp.pytorch.sharded.table import Entry, Image, Table, parse
from lastgasp.pytorch.sharded.values import Groups

__all__ = [
    "LAYOUT",
    "Entry",
    "Groups",
    "Image",
    "ShardedFiles",
    "Shards",
    "Table",
    "file_name",
    "fill",
    "gasp_path",
    "is_hybrid",
    "is_sharded",
    "let_go",
    "load",
    "metadata",
    "parse",
    "periodic_path",
    "replica_groups",
    "stays_alive",
    "unsupported",
    "whole_parameters",
    "write_arena",
    "write_live",
]
