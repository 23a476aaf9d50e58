"""The manager of a job."""

from __future__ import annotations

from typing import Any

from lastgasp_taskd import manager

__all__ = ["init_taskd_manager", "start_taskd_manager"]


def init_taskd_manager(config: dict[str, Any]) -> bool:
    """Check `config` (job_id, node_nums, proc_per_node) and add taskd_enable to it. False where it is wrong."""
    return manager.init(config)


def start_taskd_manager() -> bool:
    """Wait until the process that has started this one is gone; then False, as TaskD's after an error."""
    return manager.start()
