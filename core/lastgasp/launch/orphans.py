"""Ends processes left by dead workers: multiprocessing's helpers survive a killed parent.

torch_dist's spawn Manager holds 550 MB per rank and still exists 40 minutes later (docs/facts/megatron.md §3);
a forked writer of an async save may still be writing into a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from lastgasp import _clock

log = logging.getLogger("lastgasp.launch")

MARK = "LASTGASP_ROUND"
"""An environment variable that identifies the workers of one attempt and their children."""
_END_BY_THEMSELVES = (b"multiprocessing.resource_tracker", b"compile_worker", b"ascend.mindio.controller import main")
ENDS = 2.0
"""Seconds that killed processes may take to end: one that waits for a file system cannot, until that answers."""
_SHOWN = 3
_PARENT, _SESSION = 1, 3
"""Fields of /proc/PID/stat behind the name."""
_HELPERS = (b"from multiprocessing.spawn import", b"from multiprocessing.forkserver import")


def new_mark() -> str:
    """A value unique to an attempt."""
    return secrets.token_hex(8)


def reap(mark: str, command: Sequence[str] = ()) -> list[int]:
    """Kill multiprocessing's helpers left by the attempt `mark`, once its workers have ended.

    A resource tracker is left alone: it ends after the others and cleans up. So is what has begun a session of its own
    (a daemon), and what that has started.

    Args:
        command: the end of the workers' command line, which forked children share.

    Returns:
        The process ids.
    """
    pids = _of_attempt(mark)
    return _end_helpers([pid for pid in pids if _field(pid, _SESSION) not in pids], command)


def reap_session(leader: int, command: Sequence[str] = ()) -> list[int]:
    """Kill the same helpers of one dead rank, while the others train on.

    Args:
        leader: process id that it had. A rank begins a session of its own, in which its children are.
        command: as of `reap`.

    Returns:
        The process ids.
    """
    return _end_helpers([pid for pid in _all() if pid != leader and _field(pid, _SESSION) == leader], command)


def _end_helpers(pids: Iterable[int], command: Sequence[str]) -> list[int]:
    found = [pid for pid in pids if _is_helper(_read(pid, "cmdline"), command)]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = _clock.monotonic() + ENDS
    while any(_runs(pid) for pid in found) and _clock.monotonic() < deadline:
        time.sleep(0.005)
    if found:
        log.warning("ended %d helper processes that dead ranks had left: %s", len(found), found)
    if os.getpid() == 1:
        _collect_orphans()
    return found


def _collect_orphans() -> None:
    """What has ended of the orphans that a container's first process gets, which it alone can remove.

    Its own children, of which others wait for the exit codes, begin sessions of their own or stay in its session.
    One that was killed looks as if it had ended, and cannot be removed, while other threads of it still end.
    """
    deadline = _clock.monotonic() + ENDS
    while ended := [pid for pid in _all() if _is_orphan(pid) and not _runs(pid)]:
        for pid in ended:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if _clock.monotonic() > deadline:
            return
        time.sleep(0.005)


def _is_orphan(pid: int) -> bool:
    return _field(pid, _PARENT) == os.getpid() and _field(pid, _SESSION) not in (pid, os.getsid(0))


def tell_of_others(mark: str, own: int = 0) -> None:
    """Log what else the workers of the attempt `mark` have started, such as a server, once they have ended.

    It is left alone, as by torchrun; but new workers may need what it holds.

    Args:
        own: process id of the launcher's own that has the mark, too.
    """
    here = os.getpid() if os.getpid() != 1 else -1  # children of the launcher are no orphans, unless all orphans are
    left = [(pid, _read(pid, "cmdline")) for pid in _of_attempt(mark) if pid != own and _field(pid, _PARENT) != here]
    others = [f"{pid} ({_shown(cmdline)})" for pid, cmdline in left if _is_users(cmdline)]
    if others:
        shown = ", ".join(others[:_SHOWN]) + (" and more" if len(others) > _SHOWN else "")
        log.warning("left running: processes that dead ranks had started, which may hold ports or files that the new "
                    "ranks need: %s", shown)  # fmt: skip


def _is_users(cmdline: bytes) -> bool:
    return bool(cmdline) and not any(name in cmdline for name in _END_BY_THEMSELVES)


def _shown(cmdline: bytes) -> str:
    return " ".join(os.fsdecode(cmdline).split("\0")).strip()[:80].encode("ascii", "replace").decode()


def _of_attempt(mark: str) -> list[int]:
    needle = f"{MARK}={mark}".encode()
    return [pid for pid in _all() if needle in _read(pid, "environ").split(b"\0")]


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _field(pid: int, number: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[number]) if len(fields) > number else 0


def _runs(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b")")[2].split()[:1]
    return bool(state) and state[0] not in (b"Z", b"X")


def _is_helper(cmdline: bytes, command: Sequence[str]) -> bool:
    if any(helper in cmdline for helper in _HELPERS):
        return True
    ending = b"\0".join(os.fsencode(word) for word in command)
    return bool(ending) and cmdline.rstrip(b"\0").endswith(ending)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""
