"""The functions of a controller; needs no framework."""

from __future__ import annotations

from lastgasp_mindio.controller import tft_destroy_controller as tft_destroy_controller
from lastgasp_mindio.controller import tft_init_controller as tft_init_controller
from lastgasp_mindio.controller import tft_notify_controller_change_strategy as tft_notify_controller_change_strategy
from lastgasp_mindio.controller import tft_notify_controller_dump as tft_notify_controller_dump
from lastgasp_mindio.controller import tft_notify_controller_on_global_rank as tft_notify_controller_on_global_rank
from lastgasp_mindio.controller import tft_notify_controller_prepare_action as tft_notify_controller_prepare_action
from lastgasp_mindio.controller import tft_notify_controller_stop_train as tft_notify_controller_stop_train
from lastgasp_mindio.controller import tft_query_high_availability_switch as tft_query_high_availability_switch
from lastgasp_mindio.controller import tft_register_mindx_callback as tft_register_mindx_callback
from lastgasp_mindio.controller import tft_start_controller as tft_start_controller

__all__ = [
    "tft_destroy_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
    "tft_start_controller",
]
