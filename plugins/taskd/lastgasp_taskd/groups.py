"""`group_info`: parallel_group.json of this rank, from torch's process groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lastgasp.adapter.files import make_directory, write_atomically
from lastgasp.adapter.worker import GROUPS_FILE, groups_text, marks_directory, task_id

from . import log, worker
from .said import refused

BASE = "GROUP_BASE_DIR"


def get_save_path(rank: int) -> str:
    """The rank's folder, made if need be: below `GROUP_BASE_DIR`, or else that of its marks; "" if there is neither."""
    base = os.environ.get(BASE)
    folder = Path(base, task_id(0), str(rank)) if base else marks_directory()
    if folder is None:
        refused(f"get_save_path: set {BASE}, or call start_taskd_worker before: nothing is marked here yet")
        return ""
    try:
        make_directory(folder)
    except OSError as error:
        refused(f"get_save_path: {folder}: {error}")
        return ""
    return str(folder)


def get_group_info(rank: int) -> dict[str, Any]:
    """The groups that this rank is in, by torch's own name of each: group_name, group_rank, global_ranks.

    The real one knows HCCL's groups alone; off Ascend those of every backend count.
    """
    from lastgasp.adapter.torch import process_groups

    found = process_groups()
    if not found:
        refused("get_group_info: torch.distributed is not initialised")
    return dict(found)


def dump_group_info() -> None:
    """Write it to the rank's folder: now, or once that is known, with the first step or range."""
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        refused("dump_group_info: torch.distributed is not initialised")
        return
    if not os.environ.get(BASE) and worker.current is not None and worker.current.waits(dump_group_info):
        return
    rank = dist.get_rank()
    if not (folder := get_save_path(rank)):
        return
    try:
        write_atomically(Path(folder, GROUPS_FILE), groups_text(get_group_info(rank)))
    except OSError as error:
        log.error("%s was not written to %s: %s", GROUPS_FILE, folder, error)
