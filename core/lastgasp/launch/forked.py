"""A child that this process has not started itself, with the methods of `subprocess.Popen` that a launcher uses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

from lastgasp import _clock

POLL = 0.005
"""Seconds between two looks at a process that is waited for."""


class ForkedProcess:
    """Attributes: pid, and returncode as `subprocess.Popen` has it: None while it runs, -N for death by signal N.

    Raises:
        ChildProcessError: it is not a child of this process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._looking = threading.Lock()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def poll(self) -> int | None:
        """The exit code; None while it runs, and while another thread looks."""
        if self._looking.acquire(blocking=False):  # who comes second would find no child any more
            try:
                if self.returncode is None:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
            finally:
                self._looking.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends.

        Raises:
            subprocess.TimeoutExpired: it did not within `timeout` seconds.
        """
        begun = _clock.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and _clock.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL)
        return code

    def send_signal(self, number: int) -> None:
        """Of no effect once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """By SIGKILL; of no effect once it has ended."""
        self.send_signal(signal.SIGKILL)
