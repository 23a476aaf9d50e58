"""The worker processes that msrun has started: who they are, how they ended, what they wrote."""

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
        log: where its output goes; None where the kernel does not tell.
        ended: its exit code, where msrun had waited for it before we looked.
    """

    rank: int
    pid: int
    log: Path | None
    ended: int | None = None

    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. It stays to be waited for by msrun."""
        if self.ended is not None:
            return self.ended
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return 1  # msrun has waited for it, which it does when it has killed it
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def tell(self, number: signal.Signals) -> None:
        """Send it a signal, where it still is."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def workers_of(monitored: Mapping[int, Mapping[str, object]]) -> list[Worker]:
    """What msrun's MONITOR has told about those it started."""
    found = []
    for entry in monitored.values():
        pid, rank, status = entry.get("pid"), entry.get("global_rank"), entry.get("status")
        if isinstance(pid, int) and isinstance(rank, int):
            ended = None if status is None else int(status != 0)
            found.append(Worker(rank=rank, pid=pid, log=_link(f"/proc/{pid}/fd/1"), ended=ended))
    return found


def keep_logs(workers: list[Worker], attempt: int) -> list[Path]:
    """msrun would write the next attempt over them: `worker_0.log` becomes `worker_0.attempt0.log`.

    Returns:
        Where they are now.
    """
    kept = []
    for log in {worker.log for worker in workers if worker.log is not None}:
        target = log.with_name(f"{log.stem}.attempt{attempt}{log.suffix}")
        with contextlib.suppress(OSError):
            log.replace(target)
            kept.append(target)
    return sorted(kept)


def wait_shown(readers: list[int], logs: list[Path], seconds: float) -> None:
    """Let the processes that show the logs come to the end of them, before they are killed.

    Args:
        readers: their process ids.
    """
    deadline = _clock.monotonic() + seconds
    while _clock.monotonic() < deadline and any(_behind(pid, logs) for pid in readers):
        time.sleep(_TAIL_PAUSE)


def _behind(pid: int, logs: list[Path]) -> bool:
    folder = Path(f"/proc/{pid}/fd")  # not to be read, where the process has ended
    with contextlib.suppress(OSError, ValueError, IndexError):
        for entry in folder.iterdir():
            log = _link(str(entry))
            if log in logs:
                text = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                position = int(text.partition("pos:")[2].split()[0])
                return position < log.stat().st_size
        return True  # it has only just been started
    return False


def _link(path: str) -> Path | None:
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return Path(target) if target.startswith("/") and not target.startswith("/dev/") else None
