"""When the optimizer's update was, by the device's clock."""

from __future__ import annotations

from lastgasp_mindio.utils import get_l2_hbm_error_time as get_l2_hbm_error_time
from lastgasp_mindio.utils import tft_can_do_uce_repair as tft_can_do_uce_repair
from lastgasp_mindio.utils import tft_set_update_end_time as tft_set_update_end_time
from lastgasp_mindio.utils import tft_set_update_start_time as tft_set_update_start_time
