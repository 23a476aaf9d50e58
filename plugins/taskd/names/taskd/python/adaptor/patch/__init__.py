"""Imported by a line in torch/distributed/run.py: jobs restart without a flag; lastgasp's agent runs the workers."""

from lastgasp_taskd.agent import patch

from .torch_patch import patch_torch_method

__lastgasp__ = True
__all__ = ["patch_torch_method"]

patch()
