"""The two places where Lightning 2.6 would undo a gasp (docs/facts/lightning.md); each returns its undo."""

from __future__ import annotations

import threading
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lastgasp.adapter import Session
from lastgasp_lightning.compat import Undo, replace_method

LEAVE = 60.0
"""Seconds for this process to exit on its own once the recovery is over."""


def no_sigterm_broadcast(trainer: Any) -> Undo:
    """Remove the broadcast of every batch: lastgasp's handling of SIGTERM replaces it, and it costs a device sync."""
    return replace_method(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda _: lambda: None)


def hold_observer(session: Session) -> Undo:
    """Hold back the script launcher's observer, which SIGKILLs all ranks 0 to 5 s after one died.

    It is a thread of rank 0's process, the parent of the others.
    """
    original = _ChildProcessObserver._terminate_all
    limit = session.config.finish_timeout + 2 * session.config.save_timeout

    def held(self: _ChildProcessObserver) -> None:
        session.status.wait_over(limit)
        threading.Event().wait(LEAVE)  # a daemon thread: it ends with the process
        original(self)

    _ChildProcessObserver._terminate_all = held  # type: ignore[method-assign]

    def undo() -> None:
        outcome = session.status.outcome
        goes_on = outcome is None or outcome.again is not None  # else this process is about to exit
        if goes_on and _ChildProcessObserver._terminate_all is held:
            _ChildProcessObserver._terminate_all = original  # type: ignore[method-assign]

    return undo
