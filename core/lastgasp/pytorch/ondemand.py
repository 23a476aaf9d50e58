"""Bytes that are made after a fault, and not waited for without end: a device may answer no more."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lastgasp import _clock

PATIENCE = 1.0
"""Seconds."""


class OnDemand:
    """Those of one step at a time.

    Args:
        make: makes them; never raises.
        apart: on a thread of their own; else where they are asked for, so that the answer to a fault comes no later.
    """

    def __init__(self, make: Callable[[int], bytes], apart: bool) -> None:
        self._make, self._apart, self._lock = make, apart, threading.Lock()
        self._step, self._ends = -1, 0.0
        self._done = threading.Event()
        self._found = b""

    def poll(self, step: int) -> bytes | None:
        """Those of a step; empty where they were not made in time, None while they may be."""
        with self._lock:
            if step != self._step:
                self._begin(step)
            if self._done.is_set():
                return self._found
            return None if _clock.monotonic() < self._ends else b""

    def wait(self, step: int) -> bytes:
        """The same, waited for."""
        found = self.poll(step)
        if found is None:
            self._done.wait(PATIENCE)
        return self.poll(step) or b""

    def _begin(self, step: int) -> None:
        self._step, self._ends, self._found = step, _clock.monotonic() + PATIENCE, b""
        self._done = done = threading.Event()

        def run() -> None:
            found = self._make(step)
            with self._lock:
                if done is self._done:
                    self._found = found
                    done.set()

        if self._apart:
            try:
                threading.Thread(target=run, name="lastgasp-values", daemon=True).start()
            except RuntimeError:  # a limit of processes is reached; here it might wait for the device without end
                done.set()
        else:
            self._found = self._make(step)
            done.set()
