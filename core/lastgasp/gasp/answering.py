"""A rank's answer to a Prepare: which step it holds, once its training thread has left the update.

Where nothing has failed, and ranks that were missing are to be taken in, the thread has to have come to the end of its
step as well: one that is busy elsewhere would not follow the order to enter the training again, and the step can wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from lastgasp import _clock
from lastgasp.ports import StateSource
from lastgasp.trailer import with_trailer

from . import arena_files
from . import messages as m
from .rank_status import RankStatus
from .uncoordinated import capture_or_nothing, values_of

log = logging.getLogger("lastgasp")

REACH = 1.0
"""Seconds for a rank to complete a step that another one has already completed."""
PATIENCE = 0.8
"""The same as a share of `finish_timeout`, while no rank has stopped, so that the step will end normally."""


@dataclass
class _Asked:
    """A Prepare that waits for the training thread to leave its update, or while `growing` for the end of its step."""

    recovery: int
    deadline: float
    target: int
    reach_by: float
    growing: bool


class Answering:
    """Belongs to the control thread.

    Args:
        finish: seconds for the training thread to leave its update.
        send: sends a message to the controller; returns whether there is one.

    Attributes:
        raised: whether the training thread has raised, so that it will not complete another step.
    """

    def __init__(
        self, status: RankStatus, source: StateSource, finish: float, send: Callable[[m.Message], bool]
    ) -> None:
        self._status, self._source, self._finish, self._send = status, source, finish, send
        self._asked: _Asked | None = None
        self._target = -1
        self.raised = False

    @property
    def waits(self) -> bool:
        """Whether an answer is due, so that the training thread has to be looked at often."""
        return self._asked is not None and not self._asked.growing

    def take(self, order: m.Prepare, hold_for: float) -> None:
        """Hold the training thread at the end of its step, for `hold_for` seconds at most, and answer when it is."""
        if order.target >= m.CALLED_OFF:
            self.drop()
            self._status.go_on()
            return
        status, all_run = self._status, all(fault.kind == "sigterm" for fault in order.faults)
        status.hold(hold_for, order.target, all_run)
        self._target, growing = order.target, not order.faults
        status.may_go_on = growing
        # Whoever stands one step behind would wait there, and this rank in its next step for it.
        if all_run and status.begun > (order.target if growing else max(order.target, status.step)):
            self._send(m.Entered(recovery=order.recovery, step=status.begun))
        if growing:
            log.debug("rank %d is to stop at the end of its step: missing ranks can be taken in", self._source.rank)
        self.expect(order.recovery, order.target, growing)

    def expect(self, recovery: int, target: int, growing: bool = False) -> None:
        """Answer as soon as the rank is out of its update and has reached `target`, or cannot."""
        now, reach = _clock.monotonic(), self._finish * PATIENCE if self._status.all_run else REACH
        self._asked = _Asked(recovery, now + self._finish, target, now + reach, growing)

    def drop(self) -> None:
        """The recovery is over."""
        self._asked = None

    def look(self, shares_host: bool) -> None:
        """Answer if that can be done now.

        Args:
            shares_host: the controller reads this rank's buffer itself.
        """
        asked, status = self._asked, self._status
        if asked is None or (asked.growing and not (status.waits or self.raised)):
            return
        trouble = status.look_again()
        late = _clock.monotonic() >= asked.deadline
        if (trouble or not status.consistent) and not status.broken and not late:
            return
        if status.step < asked.target:
            # A thread that has raised will not complete another step.
            if self.raised or _clock.monotonic() >= asked.reach_by:
                asked.target = -1
                status.close()  # and check again: what is reported must stay true
            return
        late_words = f"still inside its update after {self._finish:g} s"
        why = status.broken or trouble or ("" if status.consistent else late_words)
        values = b"" if why else values_of(self._source, status.step)
        if values is None:
            return
        self._asked = None
        self._answer(asked.recovery, why, shares_host, values)

    def _answer(self, recovery: int, why: str, shares_host: bool, values: bytes) -> None:
        """Report which step this rank holds; or `why` it holds none."""
        status = self._status
        aux = b"" if why or shares_host else capture_or_nothing(self._source, status.step)
        aux = with_trailer(aux, values)
        answer = m.Prepared(
            recovery=recovery,
            step=status.step, durable=status.durable, usable=not why,
            why=why or status.why_not_again(), no_fewer=status.no_fewer,
            aux=aux, target=self._target, arena=arena_files.steps_of(self._source),
            ends=status.ends_of_connections(), cut_short=status.cut_short == status.step,
        )  # fmt: skip
        try:
            self._send(answer)
        except Exception as error:  # too large to send; but a rank that does not answer counts as hung and is killed
            words = f"its answer could not be sent: {m.one_line(error)}"
            self._send(msgspec.structs.replace(answer, usable=False, why=words, aux=b""))
