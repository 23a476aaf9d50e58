"""The manager behind `taskd.api.taskd_manager_api`."""

from lastgasp_taskd.manager import Manager

__all__ = ["Manager"]
