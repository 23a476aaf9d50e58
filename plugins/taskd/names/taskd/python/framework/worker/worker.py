"""The worker behind `taskd.api.taskd_worker_api`."""

from __future__ import annotations

from lastgasp_taskd import worker

__all__ = ["Worker"]


class Worker:
    """Prepared by `init_worker`, registered by `start`; each returns False where it is refused."""

    def __init__(self, global_rank: int, framework: str = "pt") -> None:
        self.global_rank, self.framework = global_rank, framework

    def init_worker(self, upper_limit_of_disk_in_mb: int) -> bool:
        """Prepare it; the limit is that of the files of marks, in MB."""
        return worker.init(self.global_rank, upper_limit_of_disk_in_mb, self.framework)

    def start(self) -> bool:
        """Register it."""
        return worker.start()

    @staticmethod
    def destroy() -> bool:
        """Take the registration back."""
        return worker.destroy()
