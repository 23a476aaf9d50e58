"""The window helpers (mindio_tft.md §2.3)."""

from __future__ import annotations

_window: list[int | None] = [None, None]


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Remember when the update began."""
    _window[0] = start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Remember when it ended."""
    _window[1] = end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Later than both bounds, or strictly inside them."""
    if not hbm_error_time or start_time is None or end_time is None:
        return False
    return hbm_error_time > max(start_time, end_time) or start_time < hbm_error_time < end_time
