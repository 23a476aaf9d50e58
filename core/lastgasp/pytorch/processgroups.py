"""torch's process groups, as parallel_group.json lists them (docs/facts/taskd.md §6)."""

from __future__ import annotations

import re
from typing import Any, TypedDict

import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

DEFAULT = "default_group"
"""What TaskD calls the group of all ranks."""
UNNAMED = "unnamed_group"
"""A group of somebody's own class that torch has given no name."""

KNOWN = {
    "tensor_model_parallel_group": "tp",
    "pipeline_model_parallel_group": "pp",
    "data_parallel_group": "dp",
    "data_parallel_group_with_cp": "dp_cp",
    "context_parallel_group": "cp",
    "model_parallel_group": "mp",
    "expert_model_parallel_group": "ep",
    "default_pg": DEFAULT,
}
"""`group_desc` in lower case -> name. Megatron's own descriptions; its consumer looks for `tp` and `pp`."""
_MESH = re.compile(r"mesh_(?!dim_\d|default)(\w+)")
"""`DeviceMesh` describes the groups of a named dimension so."""


class Group(TypedDict):
    """One entry of parallel_group.json."""

    group_name: str
    group_rank: int
    global_ranks: list[int]


def process_groups() -> dict[str, Group]:
    """The groups that this rank is a member of: key -> entry; empty where there are none.

    The key is torch's own name of the group, the same on all its members, and is what a communication mark gives
    as `groupName`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    found = {key_of(group): _entry(group) for group in members()}
    return dict(sorted(found.items()))


def key_of(group: ProcessGroup | None) -> str:
    """The key of a group in parallel_group.json; None means the group of all ranks."""
    whole = group if group is not None else dist.group.WORLD
    try:
        return str(getattr(whole, "group_name", "") or DEFAULT)
    except RuntimeError:
        return UNNAMED


def name_of(description: str) -> str:
    """`tp`, `pp`, `dp` ... as `group_desc` names it; an unknown one stays as it is, and a missing one is empty."""
    text = description.lower()
    mesh = _MESH.fullmatch(text)
    if mesh:
        return mesh[1]
    return KNOWN.get(text, "" if text == "undefined" else description)


def members() -> list[ProcessGroup]:
    """Those of this rank. torch lists them nowhere in public; where this list is gone, the one of all ranks counts."""
    listed: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", None)
    groups = list(listed) if listed else [dist.group.WORLD]
    return [group for group in groups if isinstance(group, ProcessGroup)]


def _entry(group: ProcessGroup) -> Group:
    return Group(
        group_name=name_of(str(getattr(group, "group_desc", "") or "")),
        group_rank=dist.get_group_rank(group, dist.get_rank()),
        global_ranks=list(dist.get_process_group_ranks(group)),
    )
