"""A rank whose process stays: its training thread waits here while MindIO's orders come on a thread of MindIO's.

The order is that of docs/facts/mindio_tft.md §6: the rank reports, `stop` and `clean` are called, then `repair` on some
ranks, `rollback` on all, and the wait ends. Whatever ends it otherwise (an exit order, a dump, the limit) leaves the
rank as it was: its fault is then answered as ever.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lastgasp import _clock
from lastgasp.errors import NotSaveable
from lastgasp.gasp.again import INCARNATION
from lastgasp.gasp.messages import one_line
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Repaired

from . import api as package
from . import exits

log = logging.getLogger("lastgasp")

TICK = 0.2
"""Seconds between two signs of life of a parked training thread, for the hang watchdog."""
_MEMORY = ("RS_UCE", "RS_UCE_CORRUPTED")


class Parking:
    """One per rank.

    Args:
        api: `mindio_ttp.framework_ttp`. rank: this one. status: its status word.
        retry: whether faults of memory and links are repaired.
        limit: seconds after which MindIO has forgotten this rank.
        patience: seconds in which it orders a rank to stop that has only lost a peer.

    Attributes:
        number: how often this rank has gone on, whichever process it had.
        told: MindIO knows of the fault for which this rank was parked last.
        unanswered: MindIO has ordered nothing then, until the limit.
        at_each_look: called on the training thread while it is parked, each `TICK` seconds.
        stays: called when an order says that this process keeps its rank: MindIO has none for one that is replaced.
    """

    def __init__(
        self, api: Any, rank: int, status: RankStatus, retry: bool, limit: float, *, patience: float = exits.DETECTION
    ) -> None:
        self._api, self._rank, self._status, self._retry, self._limit = api, rank, status, retry, limit
        self._patience, self._stop = patience, threading.Event()
        self.number = int(os.environ.get(INCARNATION) or 0)
        self._source, self._takers, self._lost = -1, tuple[int, ...](), tuple[int, ...]()
        self._repaired: Repaired | None = None
        self.told = self.unanswered = self._warned = False
        self.at_each_look: Callable[[], None] = lambda: None
        self.stays: Callable[[], None] = lambda: None

    # -- MindIO's message thread ------------------------------------------------------------------

    def stopped(self) -> None:
        """`stop`: from now on this rank may report that it has left its step, for which MindIO waits."""
        self._forget()
        self._stop.set()

    def _forget(self) -> None:
        self._source, self._takers, self._lost, self._repaired = -1, (), (), None

    def rebuilt(self, lost: tuple[int, ...]) -> None:
        """`rebuild_group` or `zit_upgrade_rebuild`: these ranks have new processes."""
        self._lost = lost

    def repair(self, pairs: Mapping[str, Any]) -> None:
        """`repair` or `zit_upgrade_repair`: who gives its state to whom.

        Raises:
            NotSaveable: nothing that could be carried out.
        """
        found = list(zip(map(int, pairs["src"]), map(int, pairs["dst"]), strict=True))
        gives = tuple(sorted({taker for giver, taker in found if giver == self._rank and taker != giver}))
        givers = {giver for giver, taker in found if taker == self._rank and giver != taker}
        if bool(gives) == bool(givers) or len(givers) > 1:
            raise NotSaveable(f"rank {self._rank} can neither give nor take its state by the pairs {found}")
        self._source, self._takers = (self._rank, gives) if gives else (givers.pop(), (self._rank,))

    @property
    def takes(self) -> bool:
        """Whether this rank takes the state of another one."""
        return self._rank in self._takers

    @property
    def gives(self) -> bool:
        """Whether this rank's state goes to another one."""
        return self._source == self._rank

    def stands_for(self, first: int) -> bool:
        """Whether this rank writes the shard whose first holder is `first`: it is that one, or gives it its state."""
        return (first == self._rank and not self.takes) or (self.gives and first in self._takers)

    def rolled_back(self, step: int) -> None:
        """`rollback` has been carried out: the training thread goes on as soon as MindIO lets it."""
        self.number += 1
        self._repaired = Repaired(self.number, step, self._source, self._takers, self._lost)
        self._stop.clear()

    def resized(self, step: int, members: tuple[int, ...]) -> None:
        """`zit_downgrade_rebuild` or `zit_upgrade_rollback` has been carried out: these ranks go on."""
        self.number += 1
        self._repaired = Repaired(self.number, step, self._source, self._takers, self._lost, members)
        self._stop.clear()

    # -- the training thread ----------------------------------------------------------------------

    @property
    def stop_came(self) -> threading.Event:
        """Set from `stop` to `rollback`."""
        return self._stop

    def wait(self, kind: str, cause: str) -> Repaired | None:
        """The training thread has left its step: report that, and wait for MindIO's orders.

        Returns:
            None where this rank's fault is to be answered as ever; `told` says whether MindIO has heard of it.
        """
        self.told = self.unanswered = False
        state = exits.state_of(cause, self._retry)
        if state in _MEMORY:
            self._status.broken = self._status.broken or f"its memory had an error: {cause}"
        if state == "RS_UNKNOWN" and (kind == "peer" or self._status.passing) and self._ordered_to_stop(kind):
            state = "RS_NORMAL"
        if state == "RS_UNKNOWN" or self._status.outcome is not None:
            return None
        if state in exits.PARKED:  # no `stop` comes
            self._forget()
        self._repaired, self.told = None, True
        if not self._answered(state):
            return None
        return self._repaired

    def _ordered_to_stop(self, kind: str) -> bool:
        """A collective was cut by `stop`, here or on a rank that got the order first; or a peer is lost, which MindIO
        has yet to notice."""
        deadline = _clock.monotonic() + (self._patience if kind == "peer" else 0.0)
        while not self._stop.wait(TICK if _clock.monotonic() < deadline else 0.0):
            if self._status.outcome is not None or _clock.monotonic() >= deadline:
                return False
            self._status.progress(self._status.phase)
        return True

    def _answered(self, state: str) -> bool:
        """Whether MindIO's last word is to go on. It waits without a limit, so it does so on a thread of its own."""
        found: list[bool] = []
        done = threading.Event()

        def ask() -> None:
            try:
                found.append(self._ask(state))
            except Exception as error:
                log.error("MindIO does not answer: %s", one_line(error))
            finally:
                done.set()

        threading.Thread(target=ask, name="lastgasp-mindio-parked", daemon=True).start()
        deadline = _clock.monotonic() + self._limit
        while not done.wait(TICK):
            self.unanswered = _clock.monotonic() >= deadline
            if self._status.outcome is not None or self.unanswered:
                return False
            self._status.progress(self._status.phase)
            self._look()
        return bool(found) and found[0]

    def _look(self) -> None:
        try:
            self.at_each_look()
        except RuntimeError as error:
            if not self._warned:
                log.warning("rank %d cannot look for the other process of its rank: %s", self._rank, one_line(error))
            self._warned = True

    def _ask(self, state: str) -> bool:
        api = self._api
        api.tft_report_error(int(api.ReportState[state].value))
        again = int(api.Action.RETRY.value)
        if state not in exits.PARKED and api.tft_wait_next_action() != again:
            return False
        wait = package.hidden(api, "tft_wait_repair_action")
        return wait is None or wait() == again
