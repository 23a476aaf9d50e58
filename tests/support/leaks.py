"""What a test may leave behind, before and after: the snapshots that the leak police compares."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgasp.steps import format as layout
from lastgasp.testing.jobs import command_line, marked, read_proc

MARK = "LASTGASP_TEST_MARK"
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
_IGNORED_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True)
class Snapshot:
    """What the process holds at one moment."""

    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    environ: Mapping[str, str]
    handlers: Mapping[int, Any]
    wakeup_fd: int
    processes: Mapping[int, str]
    shared: frozenset[str]


def snapshot(mark: str) -> Snapshot:
    """Take one; call it on the main thread. `mark` is the running test's value of `MARK`."""
    return Snapshot(
        threads=frozenset(t for t in threading.enumerate() if type(t).__name__ not in _IGNORED_THREADS),
        sockets=frozenset(_sockets()),
        environ=_watched_variables(),
        handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
        wakeup_fd=_wakeup_fd(),
        processes=_processes(mark),
        shared=_shared(mark),
    )


base = ""
"""Where pytest keeps the temporary directories of this run."""


def leaks(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing that `after` has and `before` had not, or that changed."""
    found = [f"thread {t.name} (daemon={t.daemon}) still runs" for t in after.threads - before.threads]
    found += [f"{name} is still open" for name in sorted(after.sockets - before.sockets)]
    found += list(_changed("environment variable", before.environ, after.environ))
    handlers = {signal.Signals(n).name: h for n, h in before.handlers.items() if n in set(signal.Signals)}
    now = {signal.Signals(n).name: h for n, h in after.handlers.items() if n in set(signal.Signals)}
    found += list(_changed("signal handler", handlers, now))
    if before.wakeup_fd != after.wakeup_fd:
        found.append(f"wakeup fd was {before.wakeup_fd} and is {after.wakeup_fd}")
    left = sorted(set(after.processes) - set(before.processes))
    found += [f"process {pid} is left: {after.processes[pid]}" for pid in left]
    found += [f"/dev/shm/{name} is left" for name in sorted(after.shared - before.shared)]
    return found


def settle(before: Snapshot, mark: str, seconds: float) -> list[str]:
    """The leaks that are still there after `seconds`; returns as soon as there are none."""
    deadline = time.monotonic() + seconds
    while found := leaks(before, snapshot(mark)):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.02)
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
    for name in _shared(mark) - before.shared:
        Path("/dev/shm", name).unlink(missing_ok=True)


def _shared(mark: str) -> frozenset[str]:
    """Our files in shared memory, but not those of other jobs of this machine, such as another run of the tests."""
    ours = {os.getpid(), *_processes(mark)}
    found = [path for path in Path("/dev/shm").glob("lastgasp*") if not _elsewhere(path)]
    return frozenset(path.name for path in found if (pid := _owner(path.name)) in ours or not _lives(pid))


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _elsewhere(ring: Path) -> bool:
    """Whether its rows go to a directory that is not of this run: of a dead rank, nothing else tells whose it was."""
    try:
        with ring.open("rb") as file:
            file.seek(layout.DIRECTORY_AT)
            directory = file.read(int.from_bytes(file.read(2), "little")).decode("utf-8", "replace")
    except OSError:
        return False
    return bool(base and directory) and not directory.startswith(base)


def _owner(name: str) -> int:
    """The pid in `lastgasp-marks-UID-PID-RANDOM` (steps/ringfile.py); 0 in another name."""
    parts = name.split("-")
    return int(parts[3]) if parts[:2] == ["lastgasp", "marks"] and len(parts) > 3 and parts[3].isdigit() else 0


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
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:"):
            yield target


def _watched_variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _IGNORED_VARIABLES}


def _processes(mark: str) -> dict[int, str]:
    """Children (defunct ones too) and whoever carries the mark, with their command lines."""
    found = dict(marked(MARK, mark)) | _children()
    return {pid: name for pid, name in found.items() if not any(word in name for word in _IGNORED_COMMANDS)}


def _children() -> dict[int, str]:
    own = [name for name in os.listdir("/proc") if name.isdigit() and _parent(name) == os.getpid()]
    return {int(pid): command_line(pid) for pid in own}


def _parent(pid: str) -> int:
    """From /proc/PID/stat, whose second field may hold spaces and brackets; 0 for a process that is gone."""
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError, PermissionError):
        pass
