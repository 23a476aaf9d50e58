"""Signals that ask the launcher to stop, put off while it looks at its workers.

torch's handler raises its SignalException wherever the launcher is. Raised inside of torch's own timing of that look,
it ended as an UnboundLocalError. A handler of the `logging` module swallows it, so there it is always put off.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

LIMIT = 0.5
"""Seconds that one is put off: torch's look waits, however long, for processes whose function has returned.

Less than `forward.STUCK`."""
_TORCHS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class StopSignals:
    """A context: what arrives inside of it is handled at its end, from `at_once` on, or where the look takes long."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._puts_off = self._sent_again = False
        self._noted: list[int] | None = None
        """Its number, in an object of its own."""

    def take_over(self) -> None:
        """Stand before the handlers that torch sets in each attempt (of TORCHELASTIC_SIGNALS_TO_HANDLE)."""
        if threading.current_thread() is not threading.main_thread():
            return  # torch has set none
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _TORCHS).split(","):
            number = getattr(signal, name.strip(), None)
            handler = signal.getsignal(number) if isinstance(number, signal.Signals) else None
            if number is not None and callable(handler) and handler != self._handle:
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._sent_again = self._sent_again, False
        if again and self._noted is None:
            return  # it was handled in the meantime
        if again:
            self._noted = None
        if ((self._puts_off and not again) or _is_logging(frame)) and self._note(number):
            return
        self._puts_off, self._noted = False, None
        self._handlers[number](number, frame)

    def _note(self, number: int) -> bool:
        """Put it off; False where that cannot be limited."""
        if self._noted is not None:
            self._noted[0] = number
            return True
        self._noted = [number]
        try:  # not by `threading`, whose locks this thread may hold
            _thread.start_new_thread(self._send_again, (self._noted,))
        except RuntimeError:
            return False
        return True

    def _send_again(self, noted: list[int]) -> None:
        time.sleep(LIMIT)
        if self._noted is noted:
            self._sent_again = True
            signal.pthread_kill(threading.main_thread().ident or 0, noted[0])  # interrupts what it waits for

    def at_once(self) -> None:
        """From now on to the end of the context, as without it: what follows may wait for long.

        Raises:
            SignalException: one has arrived; raised by torch's handler.
        """
        self._puts_off = False
        noted, self._noted = self._noted, None
        if noted is not None:
            self._handlers[noted[0]](noted[0], None)

    def __enter__(self) -> None:
        self._puts_off = True

    def __exit__(self, *_: object) -> None:
        self.at_once()


def _is_logging(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "logging":
            return True
        frame = frame.f_back
    return False


def stop_this_launcher() -> None:
    """As if the user stopped the job: the ranks save, and the launcher ends with the code that says so."""
    os.kill(os.getpid(), signal.SIGTERM)
