"""What MindX (TaskD, ClusterD) and the controller say to each other (mindio_tft.md §11).

Four callbacks run on the state machine's thread, under one lock; what they raise counts as 1. Notifications come from
other threads, and there is room for one: it is overwritten by the next one, whatever the controller waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from . import _rules as rules
from ._rules import seconds, trace

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
STRATEGIES = ("retry", "recover", "dump", "exit", "downgrade", "upgrade", "continue", "migration")
SUCCESS, NO_PROCESSORS, RECOVER_STILL, DUMP_STILL, EXIT_ONLY = 0, 404, 405, 406, 499
UCE, PROCESS, NETWORK = 0, 1, 2
"""Fault types (§3)."""


class MindX:
    """The engine inside of the controller.

    Attributes:
        event: the last notification: stop_train, on_global_rank, a strategy, elegant dump, invalid; or empty.
        registered: all four callbacks were there when the controller started.
    """

    def __init__(self, callbacks: dict[str, Callable[..., Any]]) -> None:
        self._callbacks, self._lock = callbacks, threading.Lock()
        self._signal = threading.Event()
        self.registered = set(ACTIONS) <= set(callbacks)
        self.event, self.strategy, self.params = "", "", ""
        self.listed: list[str] = []
        self.waits_longer = self.pause_for = 0.0

    def report(self, action: str, *given: Any) -> bool:
        """Whether the callback took it. All but `report_fault_ranks` forget what was notified before."""
        if not self.registered:
            return action != "report_fault_ranks"
        if action == "report_strategies":
            self.listed = list(given[1])
        if action != "report_fault_ranks":
            self._signal.clear()
        trace(action, given=[dict(item) if isinstance(item, dict) else item for item in given])
        try:
            with self._lock:
                return self._callbacks[action](*given) in (0, None)
        except Exception as error:
            rules.violation(f"{action} raised {type(error).__name__}: {error}: counted as 1")
            return False

    def result(self, code: int, text: str, faults: dict[int, int]) -> None:
        """Tell how it ended."""
        self.report("report_result", code, text, dict(faults), self.strategy)
        if code == SUCCESS:
            self.strategy, self.listed = "", []

    def notified(self, event: str) -> int:
        """There is one slot."""
        trace("notified", event_is=event, instead_of=self.event)
        self.event = event
        self._signal.set()
        return 0

    def wait(self, real: float, least: float = rules.LEAST_MINDX) -> bool:
        """Whether a notification came within so many of the real seconds; it is used up."""
        came = self._signal.wait(max(seconds(real), least))
        self._signal.clear()
        return came
