"""The version whose interface is served."""

from lastgasp_taskd import VERSION as __version__

__all__ = ["__version__"]
