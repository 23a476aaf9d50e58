"""The update window: MindIO must know when the state is between two steps (docs/facts/mindio_tft.md §15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lastgasp import _clock
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import StepLeft

FORCE_STOP, STEP_FINISH = "FORCE STOP", "STEP FINISH"
LONGEST_PAUSE = 1800.0
"""Seconds that MindX may have all ranks wait between two steps before they count as hung; of its own limit, after which
the controller ends the pause, no rank hears (docs/facts/mindio_tft.md §7.3)."""


def _nothing() -> None:
    """Nobody is to be told."""


class Window:
    """The hot path of one rank, called by the training thread only. About 50 us a step (mindio_tft.md §17).

    MindIO's word comes first on the way in and last on the way out: what it takes for whole is whole. Between the
    two is local work only, or a peer that dies there keeps this rank inside for ever, and MindIO then saves nothing
    at all (mindio_tft.md §16.5).

    Args:
        api: `mindio_ttp.framework_ttp`. stand: the status word. limit: seconds to park once a dump has begun.
        step_finish: called where all ranks leave their step for a hot switch.
    """

    def __init__(self, api: Any, status: RankStatus, limit: float, step_finish: Callable[[], None] = _nothing) -> None:
        self._start, self._end, self._pause = api.tft_start_updating_os, api.tft_end_updating_os, api.tft_pause_train
        self._status, self._limit, self._step_finish = status, limit, step_finish

    def before_update(self) -> None:
        """Blocks while MindIO holds a step. Raises RuntimeError (FORCE STOP) or Released, see ports.RecoveryBackend."""
        status = self._status
        if status.inside:
            return
        self._enter()
        status.before_update()

    def _enter(self) -> None:
        try:
            self._start(-1)
        except RuntimeError:
            raise
        except Exception:  # a dump has begun: this state is needed as it is
            self._status.hold(self._limit)

    def step_completed(self, step: int) -> None:
        """Also for a step without an update (loss scaling): MindIO ignores an end without a start, without a word."""
        status = self._status
        if not status.inside:
            self.before_update()  # blocks, or leaves, as an update would
        status.step_completed(step)
        self._end(int(step))
        status.paused = _clock.monotonic() + LONGEST_PAUSE
        try:
            self._pause(int(step))
        except RuntimeError as error:
            if STEP_FINISH in str(error):
                self._step_finish()
            raise StepLeft(str(error)) from error
        finally:
            status.paused = 0.0
