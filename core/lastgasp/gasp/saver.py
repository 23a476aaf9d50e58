"""What a rank does when it is ordered to save: write, publish, or discard. Each on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lastgasp.errors import Moved
from lastgasp.ports import SaveResult, SavesTogether, StateSource, own_source

from . import arena_files
from . import messages as m
from .arena_files import BadArena

log = logging.getLogger("lastgasp")


def together(source: StateSource) -> tuple[tuple[int, ...], ...]:
    """The shards whose savers must know of one another where this rank is one of them; usually none."""
    own = own_source(source)
    return own.together if isinstance(own, SavesTogether) else ()


class Saver:
    """Carries out the orders of one rank's controller, and answers them.

    Args:
        source: where the state lives.
        send: sends a message to the controller; False if the connection is lost.
        moved: called where the rank has completed another step since the save was ordered.
    """

    def __init__(self, source: StateSource, send: Callable[[m.Message], bool], moved: Callable[[m.Save], None]) -> None:
        self._source, self._send, self._moved = source, send, moved
        self._results: dict[tuple[int, int], SaveResult] = {}
        self._void: set[tuple[int, int]] = set()

    def save(self, order: m.Save) -> None:
        """Write temporary files; they are removed if the plan has been discarded meanwhile."""
        try:
            result = self._saved(order)
        except Moved as moved:
            log.warning("%s", moved)
            self._moved(order)
            return
        except BadArena as bad:
            log.error("step %d: %s", order.step, bad)
            why = m.encodable(str(bad))
            self._send(m.SaveFailed(recovery=order.recovery, plan=order.plan, why=why, arena=bad.rank))
            return
        except BaseException as error:  # including a SystemExit of a user's hook: the controller must learn of it
            log.exception("the save of step %d failed", order.step)
            self._send(m.SaveFailed(recovery=order.recovery, plan=order.plan, why=m.one_line(error)))
            return
        number = order.recovery, order.plan
        self._results[number] = result
        if number in self._void:  # it took too long, and another holder is saving now
            self.discard(*number)
            return
        self._send(
            m.Saved(
                recovery=order.recovery,
                plan=order.plan,
                path=result.path,
                nbytes=result.nbytes,
                first_byte_ns=result.first_byte_ns,
                part=result.part,
            )
        )

    def _saved(self, order: m.Save) -> SaveResult:
        own = own_source(self._source)
        if isinstance(own, SavesTogether):
            return own.save_together(order.step, order.together, order.reason)
        return arena_files.save(self._source, order)

    def commit(self, order: m.Commit) -> None:
        """Make what was written visible."""
        try:
            note = self._source.publish(self._results.pop((order.recovery, order.plan)), order.parts)
        except BaseException as error:  # as in `save`
            log.exception("the checkpoint could not be published")
            self._send(m.SaveFailed(recovery=order.recovery, plan=order.plan, why=m.one_line(error)))
            return
        if note:
            log.warning("%s", note)
            self._send(m.Noted(text=m.encodable(note)))
        self._send(m.Committed(recovery=order.recovery, plan=order.plan))

    def discard(self, recovery: int, plan: int) -> None:
        """Remove what was written for this plan of a recovery, now or as soon as it is written."""
        self._void.add((recovery, plan))
        result = self._results.pop((recovery, plan), None)
        if result is not None:
            self._source.discard(result)
