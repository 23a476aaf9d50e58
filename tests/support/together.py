"""Jobs of models in shards, whose ranks may all be killed at once, so that none is left who could save anything."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lastgasp import arena
from lastgasp.testing.faults import read_log
from support.in_collectives import VARIABLE
from support.matrix import STEP, Case


@dataclass(frozen=True)
class ShardedCase(Case):
    """One job of a model in shards, with one fault."""

    shape: str = "plain"

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.shape}"

    @property
    def victim(self) -> int:
        """As of any case, or the rank of that number."""
        return int(self.rank) if self.rank.isdigit() else super().victim

    @property
    def faults(self) -> str:
        """As of any case; of two ranks; or all stop there, and are then killed together, so that nobody can save."""
        where = f"step={STEP},phase={self.moment}"
        if self.collective:
            return ""
        if self.rank == "two":
            return f"kind={self.kind},rank=1,{where};kind={self.kind},rank={self.world - 1},{where}"
        return f"kind=sigstop,rank=all,{where}" if self.rank == "all" else super().faults

    @property
    def collective(self) -> str:
        """The value of IN_COLLECTIVE, for a moment such as all_gather-2: the second one of the step."""
        name, _, number = self.moment.partition("-")
        return f"{self.kind},{self.victim},{STEP},{name},{number}" if number else ""

    def environment(self, log: Path) -> dict[str, str]:
        """What brings the fault about; it is logged there."""
        return {"LASTGASP_FAULT": self.faults, VARIABLE: self.collective, "LASTGASP_FAULT_LOG": str(log)}

    @property
    def fired(self) -> int:
        """All, or as of any case."""
        return self.world if self.rank == "all" else super().fired

    @property
    def nobody_left(self) -> bool:
        """All ranks are killed before one has saved; of two, the second one while it writes both shards."""
        second = self.moment == "gasp_save" and self.kind in ("sigkill", "sigstop")
        return self.rank == "all" or (self.world == 2 and second)


@contextmanager
def killed_together(fired: Path, count: int, launcher: set[int] | None = None) -> Iterator[None]:
    """Once so many ranks have stopped (`kind=sigstop,rank=all`, logged in `fired`), kill them all; 0 kills nobody.

    Args:
        launcher: if given, it is killed first, and the inodes of what arenas there were are put in.
    """
    over = threading.Event()

    def kill() -> None:
        while len(stopped := read_log(fired)) < count:
            if over.wait(0.05):
                return
        pids = [int(str(one["pid"])) for one in stopped] if count else []
        if launcher is not None:
            launcher.update(*(open_arenas(pid) for pid in pids))
            os.kill(int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def open_arenas(pid: int) -> set[int]:
    """The inodes of the arenas that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if arena.NAME in os.readlink(link):
                    found.add(link.stat().st_ino)
    return found
