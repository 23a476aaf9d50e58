"""The process of a rank that MindX moves to another node (hot switch), from the end of its last step to its own end.

MindIO orders it nothing more, and ClusterD has its pod deleted before it says `migration` (docs/facts/taskd.md §4): by
SIGTERM, which must not stop the job then, or by SIGKILL. Where the pod stays it ends as soon as the new process has its
rank. Until then it holds its step: where the switch fails, it is one of those that can save it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NoReturn

from lastgasp import _clock
from lastgasp.events import Fault
from lastgasp.gasp import messages as m
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus

from .early import Succeeds, early_of_this_process

log = logging.getLogger("lastgasp")

CAUSE = "MindX moves this rank to another node (hot switch): a new process takes its place"
KNOWN = 30.0
"""Seconds until a rank that has left its step knows whether it is moved."""
CONFIRM = 15.0
"""Seconds for the job's controller to confirm that it knows."""


class GivingWay:
    """Of one rank.

    Args:
        leave: ends the process at once.
    """

    def __init__(
        self, rank: int, processor: Processor, status: RankStatus, leave: Callable[[int], NoReturn]
    ) -> None:
        self._rank, self._processor, self._status, self._leave = rank, processor, status, leave
        self._succession: Succeeds | None = None
        self._now, self._said, self._known = False, False, threading.Event()
        self._known.set()

    def begins(self) -> None:
        """All ranks are about to leave their step for a switch: from now on this process's pod may be deleted."""
        self._known.clear()

    def step_finished(self) -> None:
        """They have: find out whether it is this rank that is moved, and say so."""
        try:
            self._step_finished()
        finally:
            self._known.set()

    def over(self) -> None:
        """This rank goes on, or the switch has failed."""
        self._now = self._said = False
        self._known.set()

    def decided(self) -> bool:
        """Whether this process gives way; waits where that is about to be found out."""
        self._known.wait(KNOWN)
        return self._now

    def _step_finished(self) -> None:
        early = early_of_this_process()
        self._succession = early.meeting.succession if early is not None and early.meeting is not None else None
        if self._succession is None:
            return
        try:
            if not self._succession.look_for_successor():
                return
            self._now = True
            log.warning("%s", CAUSE)
            step, now = self._status.step, _clock.wall_ns()
            self._processor.tell(m.Report(fault=Fault(
                kind="killed", rank=self._rank, cause=CAUSE, step=step, seen_ns=now)))  # fmt: skip
            if self._processor.consult(step, None, CONFIRM) is None:
                log.error("the job's controller does not confirm that rank %d is moved", self._rank)
                return
            self._succession.give_way()
            self._said = True
        except RuntimeError as error:
            log.error("rank %d cannot give way, the store of torch's agent does not answer: %s", self._rank, error)

    def look(self) -> None:
        """While it waits: end the process once the new one has its rank. Raises RuntimeError: it cannot be asked."""
        if self._now and self._succession is not None and self._succession.taken():
            self.end()

    def not_ordered(self, unanswered: bool) -> None:
        """It has waited in vain, and may have missed that the new process has its rank, for which it must not speak.

        Args:
            unanswered: nobody has ordered anything until the limit. Our own controller lets go of who is replaced.
        """
        if self._now and self._said and (unanswered or not self._processor.led):
            self.end()

    def end(self) -> NoReturn:
        """Without a word to MindIO, which would take it for one about the rank."""
        log.warning("rank %d has a new process: this one ends", self._rank)
        self._leave(0)
