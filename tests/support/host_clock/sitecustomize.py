"""Imported by every Python that starts on a host whose clock is ahead: shifts what `time` says of the wall clock.

Time namespaces shift monotonic clocks only.
"""

from __future__ import annotations

import os
import time

_ahead = float(os.environ.get("HOST_CLOCK_AHEAD", "0"))
_time, _time_ns = time.time, time.time_ns


def _shifted() -> float:
    return _time() + _ahead


def _shifted_ns() -> int:
    return _time_ns() + int(_ahead * 1e9)


vars(time).update(time=_shifted, time_ns=_shifted_ns)
