"""Starts MindIO's processor of this rank, in the one order that it bears (docs/facts/mindio_tft.md §15)."""

from __future__ import annotations

import signal
from typing import Any

from .controller import Endpoint
from .validation import Address, wait_for_listener

JOIN = 75.0
"""Seconds for the controller to start listening, as long as MindIO itself would try."""


def start_processor(api: Any, endpoint: Endpoint, rank: tuple[int, int], granted: tuple[bool, bool, bool]) -> bool:
    """On the main thread.

    Args:
        rank: and the number of all. granted: retry, recover, elastic.

    Returns:
        Whether MindIO takes this process into a job that runs: it is a new one of its rank.

    Raises:
        DeadlineExceeded: the controller does not listen.
    """
    ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    wait_for_listener(Address(endpoint.host, endpoint.port), JOIN)
    api.tft_init_processor(*rank, False, False, "", *granted)
    for number, handler in ours.items():  # MindIO has installed one that only logs
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    api.tft_start_processor(endpoint.host, endpoint.port, "")
    return bool(api.tft_is_reboot_node())
