"""The embedded engine as recovery backend: the rank's control thread and the controller outside the ranks."""

from __future__ import annotations

import math
from typing import cast

from lastgasp import _clock
from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus, given_up


class EmbeddedBackend:
    """Implements ports.RecoveryBackend. The hot path consists of the status word's own methods.

    Args:
        rank: this rank.
        status, processor: its status word and its control thread; both are shared with the Session.
        limit: greatest duration of a recovery, in seconds.
    """

    name = "embedded"
    grace = math.inf

    def __init__(self, rank: int, status: RankStatus, processor: Processor, limit: float) -> None:
        self._rank, self._status, self._processor, self._limit = rank, status, processor, limit
        self.before_update, self.step_completed = status.before_update, status.step_completed

    def training_started(self) -> None:
        """Report this rank's step to the controller."""
        self._processor.begin()

    def fault(self, kind: str, cause: str) -> None:
        """Report the fault and wait for the outcome, by the controller or by the uncoordinated recovery."""
        now, text = _clock.wall_ns(), m.encodable(cause)
        fault = Fault(kind=cast(FaultKind, kind), rank=self._rank, cause=text, step=self._status.step, seen_ns=now)
        self._processor.report(fault)
        if self._status.wait_over(self._limit) is None:
            self._processor.over(given_up(f"no outcome within {self._limit:g} s"))

    def goodbye(self) -> None:
        """Wait for a recovery that may need this rank, within the save's limits."""
        self._processor.goodbye()

    def close(self) -> None:
        """Nothing to release: the control thread belongs to the Session."""
