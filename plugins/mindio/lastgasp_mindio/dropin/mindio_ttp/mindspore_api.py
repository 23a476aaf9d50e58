"""The two entry points of MindIO's C library, as Python functions: MindSpore's graph kernel cannot call them."""

from __future__ import annotations

from lastgasp_mindio.framework import tft_end_updating_os, tft_start_updating_os


def MindioTtpSetOptimStatusUpdating(step: int) -> int:
    """`tft_start_updating_os(step)`; 0."""
    tft_start_updating_os(step)
    return 0


def MindioTtpSetOptimStatusFinished(step: int) -> int:
    """`tft_end_updating_os(step)`; 0."""
    tft_end_updating_os(step)
    return 0
