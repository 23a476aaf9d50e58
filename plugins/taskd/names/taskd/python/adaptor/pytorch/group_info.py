"""parallel_group.json."""

from lastgasp_taskd.groups import dump_group_info, get_group_info, get_save_path

__all__ = ["dump_group_info", "get_group_info", "get_save_path"]
