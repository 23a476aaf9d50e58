"""Detects the death of processes on this host within about a millisecond, however much memory they use.

A killed process is marked PF_EXITING in /proc/PID/stat before its memory is freed; sockets, pidfds and
waitpid only report it afterwards, about 85 ms per GB later (docs/facts/limits.md §7).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lastgasp import _clock

from .guard import Guard

log = logging.getLogger("lastgasp.controller")

PERIOD = 0.001
"""Seconds between two checks."""
LONGEST = 0.05
"""Greatest number of seconds between two checks."""
SHARE = 0.05
"""Greatest share of one core; with very many processes the checks get rarer."""
_PF_EXITING = 0x4
_FLAGS, _STARTED, _EXIT_CODE = 6, 19, 49  # fields after the command's closing parenthesis, proc_pid_stat(5)

OnDeath = Callable[[int, int, str, int], None]
"""Called with the rank, its process, the evidence, and the wall-clock time in ns, on the watcher's thread."""


@dataclass
class _Watched:
    pid: int
    stat: int
    stopped: bool = False
    reported: bool = False


class ProcessMonitor:
    """A thread that checks all watched processes in turn."""

    def __init__(self, on_death: OnDeath) -> None:
        self._on_death = on_death
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._guard = Guard(log)
        self._stopped: frozenset[int] = frozenset()
        self._thread = threading.Thread(target=self._run, name="lastgasp-deathwatch", daemon=True)
        self._thread.start()

    def watch(self, rank: int, pid: int) -> None:
        """Start watching `pid`; a process that has already ended is reported at once.

        One that cannot be watched (no descriptor left) is logged; the end of its connection still reveals its death.
        """
        try:
            stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._on_death(rank, pid, f"process {pid} is gone", _clock.wall_ns())
            return
        except OSError as error:
            log.warning("process %d of rank %d cannot be watched: %s", pid, rank, error)
            return
        self.forget(rank)
        with self._lock:
            self._watched[rank] = _Watched(pid=pid, stat=stat)
        self._wake.set()

    def forget(self, rank: int) -> None:
        """Stop watching; unknown ranks are ignored."""
        with self._lock:
            watched = self._watched.pop(rank, None)
            if watched is not None:
                os.close(watched.stat)

    def stopped(self) -> frozenset[int]:
        """Ranks whose process is currently stopped (SIGSTOP, debugger)."""
        return self._stopped

    def kill(self, rank: int) -> None:
        """Send SIGKILL to the process if it is still the watched one."""
        with self._lock:
            watched = self._watched.get(rank)
            if watched is not None and _fields(watched.stat) is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(watched.pid, signal.SIGKILL)

    def age(self, rank: int) -> float:
        """Seconds since the process was started; 0 where that is not known."""
        with self._lock:
            watched = self._watched.get(rank)
            fields = _fields(watched.stat) if watched is not None else None
        if fields is None:
            return 0.0
        try:
            with open("/proc/uptime") as file:
                now = float(file.read().split()[0])
        except OSError:
            return 0.0
        return now - int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")

    def exit_status(self, rank: int) -> str:
        """How a dead, not yet reaped process ended; empty if unknown."""
        with self._lock:
            watched = self._watched.get(rank)
            fields = _fields(watched.stat) if watched is not None else None
        if fields is None or fields[0] not in (b"Z", b"X"):
            return ""
        return describe_exit(os.waitstatus_to_exitcode(int(fields[_EXIT_CODE])))

    def close(self) -> None:
        """Stop the thread and close every descriptor."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=5)
        for rank in list(self._watched):
            self.forget(rank)

    def _run(self) -> None:
        while not self._closed:
            begin = _clock.monotonic()
            with self._guard("the watch of processes"):
                for rank, pid in self._newly_dead():
                    self._on_death(rank, pid, f"process {pid} died", _clock.wall_ns())
            took = _clock.monotonic() - begin
            self._wake.wait(max(PERIOD, min(took / SHARE, LONGEST)) if self._watched else None)
            self._wake.clear()

    def _newly_dead(self) -> list[tuple[int, int]]:
        found = []
        with self._lock:
            for rank, watched in self._watched.items():
                with self._guard("a look at a process"):
                    if not watched.reported and self._dead(watched):
                        watched.reported = True
                        found.append((rank, watched.pid))
            stopped = [rank for rank, watched in self._watched.items() if watched.stopped]
        if stopped or self._stopped:
            self._stopped = frozenset(stopped)
        return found

    @staticmethod
    def _dead(watched: _Watched) -> bool:
        fields = _fields(watched.stat)
        if fields is None:
            return True
        watched.stopped = fields[0] in (b"T", b"t")
        return fields[0] in (b"Z", b"X") or bool(int(fields[_FLAGS]) & _PF_EXITING)


def _fields(stat: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on, or None when the process has been reaped."""
    try:
        text = os.pread(stat, 1024, 0)
    except OSError:
        return None
    return text[text.rfind(b")") + 2 :].split()


def describe_exit(code: int) -> str:
    """`-9` -> "killed by SIGKILL", `3` -> "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
