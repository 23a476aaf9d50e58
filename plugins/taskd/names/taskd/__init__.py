"""TaskD's names, served by lastgasp: not MindCluster's TaskD, and not installed beside it (lastgasp-taskd)."""

from pathlib import Path

from lastgasp_taskd import VERSION as __version__
from lastgasp_taskd.alone import refuse_beside_the_real_one

__lastgasp__ = True

refuse_beside_the_real_one(Path(__file__).parent)

__all__ = ["__version__"]
