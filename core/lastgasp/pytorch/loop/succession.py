"""A rank that MindX moves to another node (hot switch): what its old process and the new one agree on, in the store of
torch's agent, which outlives both.

The new process says again and again that it waits for the rank, so that one which has ended, or was never needed, is
not taken for one that waits. The old one answers, once all have left their step for the switch, that it gives way: the
job's controller knows then that another process of this rank will join. From then on it trains no more, and saves only
where the switch fails. Where it does not answer it has ended, or the controller lets no other process join as its rank.
"""

from __future__ import annotations

import logging
import threading
import uuid

from lastgasp import _clock
from lastgasp.launch.bounded import BoundedStore

log = logging.getLogger("lastgasp")

SEEN = 5.0
"""Seconds in which a process that waits says so once more; it does five times a second."""
LOOK = 0.02
"""Seconds between two looks for what the other one says."""
ANSWER = 20.0
"""Seconds for the old process to say that it gives way, once all ranks have left their step: it looks for the new one
for `SEEN`, and the controller has as long to confirm as `giving_way.CONFIRM` says."""


class Succession:
    """Of one rank.

    All methods raise RuntimeError where the store does not answer.

    Args:
        store: of torch's agent, that answers in bounded time. rank: this process's, or the one that it is to take.
    """

    def __init__(self, store: BoundedStore, rank: int) -> None:
        self._store, self._rank = store, rank
        self._name, self._successor = "", ""

    # -- the new process --------------------------------------------------------------------------

    def waits(self) -> None:
        """It waits for the rank: said first before MindIO hears of it, and then again and again."""
        if not self._name:
            self._name = uuid.uuid4().hex
            self._store.set(f"successor-{self._rank}", self._name)
        self._store.add(f"waits-{self._name}", 1)

    def take_over(self) -> None:
        """The rank is this process's from now on; the old one ends. Nothing where no switch is made."""
        if not self._name:
            return
        deadline = _clock.monotonic() + ANSWER
        while not self._store.check(f"gives-way-{self._name}"):  # a `wait` would not let `waits` through
            if _clock.monotonic() > deadline:
                log.warning("the old process of rank %d does not say that it gives way", self._rank)
                break
            threading.Event().wait(LOOK)
        self._store.set(f"taken-{self._name}", "")
        if self._store.get(key := f"successor-{self._rank}").decode() == self._name:  # nobody is to wait for it again
            self._store.delete(key)

    # -- the old process --------------------------------------------------------------------------

    def look_for_successor(self) -> bool:
        """Whether a new process waits for this one's rank."""
        self._successor = ""
        if not self._store.check(key := f"successor-{self._rank}"):
            return False
        if (name := self._store.get(key).decode()) == self._name:  # this process itself, in an earlier switch
            return False
        heard, deadline = self._store.add(f"waits-{name}", 0), _clock.monotonic() + SEEN
        while self._store.add(f"waits-{name}", 0) == heard:
            if _clock.monotonic() > deadline:
                return False
            threading.Event().wait(LOOK)
        self._successor = name
        return True

    def give_way(self) -> None:
        """To what was found; the job's controller knows."""
        self._store.set(f"gives-way-{self._successor}", "")

    def taken(self) -> bool:
        """Whether the new process has the rank."""
        return bool(self._successor) and self._store.check(f"taken-{self._successor}")
