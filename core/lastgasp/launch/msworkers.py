"""The worker processes started by msrun: identity, exit and output."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastgasp import _clock

_TAIL_PAUSE = 0.01


@dataclass(frozen=True)
class Worker:
    """One worker of this node.

    Attributes:
        rank: in the job.
        log: where its output goes; None if the kernel does not reveal it.
        ended: its exit code, if msrun had already waited for it.
    """

    rank: int
    pid: int
    log: Path | None
    ended: int | None = None

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. msrun can still wait for it."""
        if self.ended is not None:
            return self.ended
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 1  # msrun has waited for it, as it does after killing it
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def workers_of(monitored: Mapping[int, Mapping[str, object]]) -> list[Worker]:
    """Create workers from what msrun's MONITOR has reported."""
    found = []
    for entry in monitored.values():
        pid, rank, status = entry.get("pid"), entry.get("global_rank"), entry.get("status")
        if isinstance(pid, int) and isinstance(rank, int):
            ended = None if status is None else int(status != 0)
            found.append(Worker(rank=rank, pid=pid, log=_link(f"/proc/{pid}/fd/1"), ended=ended))
    return found


def keep_logs(workers: list[Worker], attempt: int) -> list[Path]:
    """Rename the logs, which the next attempt would overwrite: `worker_0.log` becomes `worker_0.attempt0.log`.

    Returns:
        Their new paths.
    """
    kept = []
    for log in {worker.log for worker in workers if worker.log is not None}:
        target = log.with_name(f"{log.stem}.attempt{attempt}{log.suffix}")
        with contextlib.suppress(OSError):
            log.replace(target)
            kept.append(target)
    return sorted(kept)


def wait_shown(readers: list[int], logs: list[Path], seconds: float) -> None:
    """Let the processes that show the logs finish showing them before they are killed.

    One that has read to the end still has to write what it read: it has done so when it sleeps.

    Args:
        readers: their process ids.
    """
    deadline = _clock.monotonic() + seconds
    while _clock.monotonic() < deadline and any(_behind(pid, logs) for pid in readers):
        time.sleep(_TAIL_PAUSE)


def _behind(pid: int, logs: list[Path]) -> bool:
    folder = Path(f"/proc/{pid}/fd")  # unreadable once the process has ended
    with contextlib.suppress(OSError, ValueError, IndexError):
        for entry in folder.iterdir():
            log = _link(str(entry))
            if log in logs:
                text = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                position = int(text.partition("pos:")[2].split()[0])
                return position < log.stat().st_size or not _sleeps(pid)
        return True  # it has just been started
    return False


def _sleeps(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return state[0] == b"S"


def _link(path: str) -> Path | None:
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return Path(target) if target.startswith("/") and not target.startswith("/dev/") else None
