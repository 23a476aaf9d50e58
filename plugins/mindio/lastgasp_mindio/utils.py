"""`mindio_ttp.utils`: when the optimizer's update was, by the device's clock (docs/facts/mindio_tft.md §2.3)."""

from __future__ import annotations

_window: list[int | None] = [None, None]
_timed = [False, False]
"""Whether an update was ever timed in this process, and since `update_was_timed` was called last."""


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """Remember when the update began; None where there is no device clock to read, which counts as unknown."""
    _window[0] = start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """Remember when the update ended."""
    _window[1] = end_time
    _timed[:] = [True, True]


def update_was_timed() -> bool | None:
    """Whether an update was timed since the last call; None: the job does not time its updates."""
    ever, since = _timed
    _timed[1] = False
    return since if ever else None


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Whether a memory error came later than both bounds, or strictly between them; False where one is unknown."""
    start = _window[0] if start_time is None else start_time
    end = _window[1] if end_time is None else end_time
    if not hbm_error_time or not start or not end:
        return False
    return hbm_error_time > max(start, end) or start < hbm_error_time < end


def get_l2_hbm_error_time(text: str) -> int:
    """The number behind `time us=` in the text of an error; 0 where there is none."""
    digits = text.partition("time us=")[2].lstrip()
    length = next((i for i, letter in enumerate(digits) if not letter.isdigit()), len(digits))
    return int(digits[:length] or 0)
