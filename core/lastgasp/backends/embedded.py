"""The embedded engine as the gasp's backend: the rank's control thread and the controller outside the ranks."""

from __future__ import annotations

import math
from typing import cast

from lastgasp import _clock
from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus, given_up


class EmbeddedBackend:
    """As the port says (ports.RecoveryBackend). The hot path is the status word's own: no call in between.

    Args:
        rank: this rank.
        stand, processor: its status word and its control thread; both are shared with the Session.
        limit: seconds that a recovery may take in all.
    """

    name = "embedded"
    grace = math.inf

    def __init__(self, rank: int, status: RankStatus, processor: Processor, limit: float) -> None:
        self._rank, self._status, self._processor, self._limit = rank, status, processor, limit
        self.before_update, self.step_completed = status.before_update, status.step_completed

    def training_started(self) -> None:
        """Tell the controller where this rank stands."""
        self._processor.begin()

    def fault(self, kind: str, cause: str) -> None:
        """Report it, and wait for the controller's word, or for the recovery alone where there is none."""
        now, text = _clock.wall_ns(), m.encodable(cause)
        fault = Fault(kind=cast(FaultKind, kind), rank=self._rank, cause=text, step=self._status.step, seen_ns=now)
        self._processor.report(fault)
        if self._status.wait_over(self._limit) is None:
            self._processor.over(given_up(f"no outcome within {self._limit:g} s"))

    def goodbye(self) -> None:
        """Waits for a recovery that may need this rank, within the save's limits."""
        self._processor.goodbye()

    def close(self) -> None:
        """Nothing of its own: the control thread is the Session's."""
