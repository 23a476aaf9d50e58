"""A process that asked for lastgasp and never came to a training that it protects must say so.

A loop of one's own in MindSpore (`value_and_grad`) calls nothing that could be hooked: a wrapper around that function
would be compiled into the user's graph.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

log = logging.getLogger("lastgasp")

PATIENCE = 120.0
"""Seconds in which a script has usually begun to train."""
_TEXT = (
    "nothing of this process is protected%s: lastgasp waits for Model.train or Model.fit, or a Trainer of MindFormers. "
    "A loop of your own (value_and_grad) is not protected: save in it yourself"
)


class Unused:
    """Waits for the first protected training of this process."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None
        self._used = False

    def watch(self) -> None:
        """Somebody has asked for lastgasp here. Idempotent; nothing in msrun's scheduler, which trains nothing."""
        if self._timer is not None or self._used or os.environ.get("MS_ROLE") == "MS_SCHED":
            return
        self._timer = threading.Timer(PATIENCE, self._say, (" so far",))
        self._timer.daemon = True
        self._timer.start()
        atexit.register(self._say, "")

    def used(self) -> None:
        """A training is protected. Idempotent."""
        self._used = True
        self.stop()

    def stop(self) -> None:
        """Wait no longer. Idempotent."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            atexit.unregister(self._say)

    def _say(self, when: str) -> None:
        if not self._used:
            log.warning(_TEXT, when)


UNUSED = Unused()
"""That of this process."""
