"""The older form of TaskD's agent for msrun."""

from lastgasp_taskd.agent import MSRunPlugin

__all__ = ["MSRunPlugin"]
