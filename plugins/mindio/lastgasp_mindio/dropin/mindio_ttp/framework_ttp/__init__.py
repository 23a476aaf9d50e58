"""The functions of a rank; as in MindIO the three of the controller, too."""

from __future__ import annotations

from lastgasp_mindio.framework import *  # noqa: F403
from lastgasp_mindio.framework import __all__ as __all__
from lastgasp_mindio.framework import get_device as get_device
from lastgasp_mindio.framework import get_mindio_export_version as get_mindio_export_version
from lastgasp_mindio.framework import set_mindio_export_version as set_mindio_export_version
from lastgasp_mindio.framework import tft_set_dp_group_info as tft_set_dp_group_info
from lastgasp_mindio.framework import tft_wait_repair_action as tft_wait_repair_action
