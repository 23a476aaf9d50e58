"""The worker of a training process."""

from __future__ import annotations

from lastgasp_taskd import worker

__all__ = ["destroy_taskd_worker", "init_taskd_worker", "start_taskd_worker"]


def init_taskd_worker(rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt") -> bool:
    """Prepare the worker of this process.

    Args:
        rank_id: the global rank.
        upper_limit_of_disk_in_mb: MB that the files of marks of all jobs may take.
        framework: "pt" or "ms".

    Returns:
        False where an argument is wrong or torchrun's (msrun's) variables are missing; the log says which.
    """
    return worker.init(rank_id, upper_limit_of_disk_in_mb, framework)


def start_taskd_worker() -> bool:
    """Register it, and begin to mark. False before `init_taskd_worker`."""
    return worker.start()


def destroy_taskd_worker() -> bool:
    """Take the registration back; marks go on. False before `init_taskd_worker`."""
    return worker.destroy()
