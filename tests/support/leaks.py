"""What a test may leave behind, before and after: the snapshots that the leak police compares."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgasp.steps import ringfile
from lastgasp.testing.jobs import command_line, read_proc
from support import prefork

MARK = "TESTS_MARK"
"""An environment variable that every process started by a test inherits, so that orphans are found too."""

# Set once per interpreter by libraries when they are imported (scikit-learn, Intel OpenMP), or by pytest.
_IGNORED_VARIABLES = (
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    MARK,
)
# Made to live as long as the interpreter: tqdm's monitor, multiprocessing's tracker of shared memory.
_IGNORED_THREADS = ("TMonitor",)
_IGNORED_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "support.prefork.server")


@dataclass(frozen=True)
class Snapshot:
    """What the process holds at one moment."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    environ: Mapping[str, str]
    handlers: Mapping[int, Any]
    wakeup_fd: int
    processes: Mapping[int, str]
    forks: int
    shared: frozenset[str]


def snapshot(mark: str, before: Snapshot | None = None) -> Snapshot:
    """Take one; call it on the main thread.

    Args:
        mark: the running test's value of `MARK`.
        before: the one of the test's beginning, when nobody had that mark.
    """
    forks = _forks()  # before anybody looks for processes
    if before is not None and 0 < forks == before.forks:
        processes = before.processes
    else:
        processes = _children() if before is None else _processes(mark)
    return Snapshot(
        threads=frozenset(t for t in threading.enumerate() if type(t).__name__ not in _IGNORED_THREADS),
        sockets=frozenset(_sockets()),
        environ=_watched_variables(),
        # pytest-timeout's own alarm is set before a test and taken back where one fails, whichever is earlier.
        handlers={number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}},
        wakeup_fd=_wakeup_fd(),
        processes=processes,
        forks=forks,
        shared=_shared(),
    )


def leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that `after` has and `before` had not, or that changed."""
    found = [f"thread {t.name} (daemon={t.daemon}) still runs" for t in after.threads - before.threads]
    found += [f"{name} is still open" for name in sorted(after.sockets - before.sockets)]
    found += list(_changed("environment variable", before.environ, after.environ))
    if before.handlers != after.handlers:
        handlers = {signal.Signals(n).name: h for n, h in before.handlers.items() if n in set(signal.Signals)}
        now = {signal.Signals(n).name: h for n, h in after.handlers.items() if n in set(signal.Signals)}
        found += list(_changed("signal handler", handlers, now))
    if before.wakeup_fd != after.wakeup_fd:
        found.append(f"wakeup fd was {before.wakeup_fd} and is {after.wakeup_fd}")
    left = sorted(set(after.processes) - set(before.processes))
    found += [f"process {pid} is left: {after.processes[pid]}" for pid in left]
    found += [f"{path} is left" for path in sorted(after.shared - before.shared)]
    return found


def settle(before: Snapshot, mark: str, seconds: float) -> list[str]:
    """The leaks that are still there after `seconds`; returns as soon as there are none."""
    deadline = time.monotonic() + seconds
    turn = 0
    while (found := leaks(before, snapshot(mark, before))) and time.monotonic() <= deadline:
        if turn % 50 == 0:
            gc.collect()  # what nobody can reach any more is no leak, whenever it would be collected
        time.sleep(0.02)
        turn += 1
    return found


def clean_up(before: Snapshot, mark: str) -> None:
    """Take away what can be, so that the next test starts as this one should have left things."""
    for name in _watched_variables():
        if name not in before.environ:
            del os.environ[name]
    os.environ.update(before.environ)
    for number, handler in before.handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if _wakeup_fd() != before.wakeup_fd:
        signal.set_wakeup_fd(before.wakeup_fd)
    for pid in set(_processes(mark)) - set(before.processes):
        _kill(pid)
    for path in map(Path, _shared() - before.shared):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _shared() -> frozenset[str]:
    """What is in this run's own place for rings: nobody else makes or recovers any there."""
    place = os.environ.get(ringfile.VARIABLE, "")
    try:
        return frozenset(f"{place}/{name}" for name in os.listdir(place))
    except OSError:
        return frozenset()  # the test has moved it


def _changed(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(before) | set(after)):
        if before.get(name) != after.get(name):
            yield f"{what} {name} was {before.get(name)!r} and is {after.get(name)!r}"


def _wakeup_fd() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    if descriptor != -1:
        signal.set_wakeup_fd(descriptor)
    return descriptor


def _sockets() -> Iterator[str]:
    kept = prefork.images.sockets()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:") and target not in kept:
            yield target


def _watched_variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _IGNORED_VARIABLES}


def _forks() -> int:
    """How many processes and threads this machine has ever started; 0 where the kernel does not tell."""
    _, _, rest = Path("/proc/stat").read_bytes().partition(b"\nprocesses ")
    return int(rest.split(b"\n", 1)[0] or 0)


def _children() -> dict[int, str]:
    """Those of this process, without their command lines. Only this process collects them, so that none is left out."""
    try:
        found = [Path("/proc/self/task", thread, "children").read_bytes() for thread in os.listdir("/proc/self/task")]
    except OSError:  # a kernel without these files, or a thread has just ended
        return _processes("")
    return dict.fromkeys(map(int, b" ".join(found).split()), "")


_foreign: set[tuple[int, bytes]] = set()
"""Processes that were looked at and carry no mark of the running test: pid and time of start."""


def _processes(mark: str) -> dict[int, str]:
    """Children (defunct ones too) and whoever carries the mark, with their command lines.

    Of other people's processes, which may be many and slow to answer, each is looked at once: an environment is the
    one of the start, and whoever inherits the mark does so from its start on.
    """
    needle, found, seen = f"{MARK}={mark}".encode(), {}, set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        parent, key = _stat(pid)
        if parent == os.getpid():  # perhaps not yet what it was forked for: not to be remembered
            found[int(pid)] = command_line(pid)
        elif parent is not None and int(pid) != os.getpid():
            environ = b"" if key in _foreign else read_proc(pid, "environ")
            if needle in environ.split(b"\0"):
                found[int(pid)] = command_line(pid)
            elif environ or key in _foreign:  # a program that is being loaded has none for a moment
                seen.add(key)
    _foreign.clear()
    _foreign.update(seen)
    for image in prefork.images.processes():  # one that has died has no command line
        found.pop(image, None)
    return {pid: name for pid, name in found.items() if not any(word in name for word in _IGNORED_COMMANDS)}


def _stat(pid: str) -> tuple[int | None, tuple[int, bytes]]:
    """The parent, and what distinguishes a process from a later one of the same pid; no parent if it is gone."""
    fields = read_proc(pid, "stat").rpartition(b")")[2].split(None, 20)  # the second field may hold spaces and brackets
    return (int(fields[1]), (int(pid), fields[19])) if len(fields) > 19 else (None, (int(pid), b""))


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError, PermissionError):
        pass
