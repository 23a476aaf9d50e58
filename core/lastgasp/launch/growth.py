"""New processes for ranks that are missing: started beside those that train, and taken in once they are ready.

Each rank of the complete job has a seat, the number that it began with. Where ranks are missing the others have other
numbers, in the order of their seats; who is taken in gets the place of its seat.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerGroup

from lastgasp import _clock
from lastgasp.gasp.again import NEW, Again
from lastgasp.gasp.joining import CODE, IF_ASKED, JOINS, Code, different
from lastgasp.gasp.process_monitor import describe_exit
from lastgasp.launch.guest import Guest, Host
from lastgasp.launch.warm import Warm
from lastgasp.launch.warm_process import NoFork
from lastgasp.launch.warm_torch import replacement
from lastgasp.memory_file import memory_file

log = logging.getLogger("lastgasp.launch")

MISSING = -1
"""Stands for the number of a rank that has none any more."""
START = 900.0
"""Seconds for a new process to run the script up to its training."""
WAIT = 600.0
"""Seconds that it then waits to be taken in, which is at the end of a step."""

END = 5.0
"""Seconds for the kernel to end a process that was killed."""


class CodeFile:
    """A file in memory in which a rank of this host says what code it runs; one per launcher."""

    def __init__(self) -> None:
        self._file = memory_file("lastgasp-code")

    def begin(self, wanted: bool) -> dict[str, str]:
        """Ranks are about to be started. Returns what their environment needs.

        Args:
            wanted: by the launcher; else they only say it where their script has asked to go on with fewer.
        """
        os.ftruncate(self._file, 0)
        return {CODE: f"{'' if wanted else IF_ASKED}/proc/{os.getpid()}/fd/{self._file}"}

    @property
    def said(self) -> Code:
        """By the first of them; empty before."""
        line, end, _ = os.pread(self._file, os.fstat(self._file).st_size, 0).partition(b"\n")
        return msgspec.json.decode(line, type=Code) if end else {}


def _user_of(pid: int) -> int | None:
    """As whom a process runs; None if it is gone. The owner of its folder in /proc may be root in any case."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return next((int(line.split()[2]) for line in file if line.startswith("Uid:")), None)
    return None


@dataclass
class Newcomer:
    """A process that waits, or will, to be taken in.

    Attributes:
        handler: torch's, of the process.
        orders, words: the launcher's ends of two pipes; theirs: the other ends, which the process opens by their paths.
        since: when it was started, or became ready.
        code: what it runs, once it is ready.
    """

    handler: Any
    orders: int
    words: int
    theirs: tuple[int, int]
    since: float = field(default_factory=_clock.monotonic)
    code: Code | None = None
    _said: bytes = b""

    @staticmethod
    def pipes() -> tuple[int, int, tuple[int, int]]:
        """`orders`, `words` and `theirs` of a process that is to be started."""
        (reads, orders), (words, writes) = (os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2))
        return orders, words, (reads, writes)

    def trouble(self, ours: Code) -> str:
        """Why it cannot be taken in any more; empty where it can, or is not ready yet. Does not wait."""
        if (exit_code := self.handler.proc.poll()) is not None:
            return f"its process has ended ({describe_exit(exit_code)})"
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(self.words, 1 << 20) if self.code is None else b""
        line, end, _ = self._said.partition(b"\n")
        if end and self.code is None:
            self.code, self.since = msgspec.json.decode(line, type=Code), _clock.monotonic()
        if self.code is not None and (why := different(ours, self.code)):
            return why
        limit = START if self.code is None else WAIT
        if _clock.monotonic() - self.since < limit:
            return ""
        what = "it has not come to its training" if self.code is None else "no step was completed after which it could"
        return f"{what} in {limit:g} s"

    def take_in(self, order: bytes) -> None:
        """Let it enter the training.

        Raises:
            OSError: it is gone.
        """
        try:
            os.write(self.orders, order + b"\n")
        finally:
            self._close()

    def end(self) -> None:
        """It is not needed; it has done nothing yet that others know of."""
        if self.handler.proc.poll() is None:
            self.handler.close(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.handler.proc.wait(END)
        for file in (self.handler._stdout, self.handler._stderr):
            if file is not None:
                file.close()
        self._close()

    def _close(self) -> None:
        for number in (self.orders, self.words, *self.theirs):
            os.close(number)


def joins(local: int, theirs: tuple[int, int]) -> str:
    """What the process of that local rank finds in `JOINS`."""
    return " ".join((str(local), *(f"/proc/{os.getpid()}/fd/{number}" for number in theirs)))


class Growth:
    """One per attempt; all of it is called on the launcher's main thread, and waits for nobody but the job's store.

    Args:
        group: the workers of this host; context: their processes.
        code: what the ranks that are there run.

    Attributes:
        host: invites the launchers of lost hosts; None where there are no others, or another launcher does.
    """

    def __init__(self, group: WorkerGroup, context: Any, warm: Warm, code: CodeFile) -> None:
        self.host: Host | None = None
        self._group, self._context, self._warm, self._code = group, context, warm, code
        self._home = {local: worker.global_rank for local, worker in enumerate(group.workers)}
        self._size: int = group.workers[0].world_size if group.workers else 0
        self._seats = list(range(self._size))
        self._planned: dict[tuple[int, ...], list[int]] = {}
        self._coming: dict[int, Newcomer] = {}
        self._hopeless: set[int] = set()

    @property
    def _missing(self) -> list[int]:
        """The local numbers of missing ranks of this host."""
        return [local for local, worker in enumerate(self._group.workers) if worker.global_rank == MISSING]

    def look(self, refused: str) -> tuple[int, ...]:
        """Between two looks at the workers, while the others train.

        Args:
            refused: why nobody is taken in now; empty where somebody may be.

        Returns:
            `Offer.grow`.
        """
        for local in self._missing:
            if local not in self._coming and local not in self._hopeless:
                self._start(local)
        for local, newcomer in list(self._coming.items()):
            if why := refused or newcomer.trouble(self._code.said):
                self._give_up(local, why)
        ready = [self._home[local] for local, newcomer in self._coming.items() if newcomer.code is not None]
        if len(ready) < len(self._coming):
            return ()
        ready += self._guests(refused)
        if not ready:
            return ()
        filled = sorted([*self._seats, *ready])
        members = tuple(NEW if seat in ready else self._seats.index(seat) for seat in filled)
        if self.host is not None and members not in self._planned:
            self.host.plans(members, filled)
        self._planned[members] = filled
        return members

    def _guests(self, refused: str) -> list[int]:
        """The seats of ranks of another host that wait."""
        if self.host is None:
            return []
        if refused:
            self.host.refuse(refused)
            return []
        return self.host.look(self._seats, self._code.said)

    # -- on a host that has come back ---------------------------------------------------------------------

    def came(self, newcomers: dict[int, Newcomer]) -> None:
        """All ranks of this host are new; from now on they wait to be taken in."""
        self._coming = newcomers
        for worker in self._group.workers:
            worker.global_rank = MISSING

    def wait(self, guest: Guest) -> str:
        """Why its ranks cannot be taken in; empty where they can, or are not ready yet. Says so when all are.

        Raises:
            SystemExit: this host does not see the job's directory.
        """
        for newcomer in self._coming.values():
            if why := newcomer.trouble(guest.code):
                return why
        if all(newcomer.code is not None for newcomer in self._coming.values()):
            guest.ready()
        return guest.refused()

    def planned(self, guest: Guest, members: tuple[int, ...]) -> bool:
        """Whether it is these ranks that are taken in so."""
        plan = guest.plan()
        if plan is None or plan.members != members:
            return False
        self._planned = {members: list(plan.filled)}
        return True

    # -- any ----------------------------------------------------------------------------------------------

    def _start(self, local: int) -> None:
        orders, words, theirs = Newcomer.pipes()
        seat = self._home[local]
        more = {JOINS: joins(local, theirs), "RANK": str(seat), "WORLD_SIZE": str(self._size)}
        try:
            if why := self._warm.changed or self._other_user():
                raise NoFork(why)
            handler = replacement(self._warm, self._context, local, more, cold=True)
        except (NoFork, OSError) as error:
            for number in (orders, words, *theirs):
                os.close(number)
            self._hopeless.add(local)
            log.warning("rank %d stays missing: no process can be started for it (%s)", seat, error)
            return
        self._coming[local] = Newcomer(handler, orders, words, theirs)
        log.info("process %d is started for rank %d, which is missing", handler.proc.pid, seat)

    def _other_user(self) -> str:
        """As whom the ranks run where that is not this launcher's user: they could not read what it orders."""
        here = [int(worker.id) for worker in self._group.workers if worker.global_rank != MISSING and worker.id]
        found = {user for user in map(_user_of, here) if user not in (None, 0, os.geteuid())}
        return f"its ranks run as user {min(found)}, and the launcher as user {os.geteuid()}" if found else ""

    def _give_up(self, local: int, why: str) -> None:
        self._hopeless.add(local)
        self._coming.pop(local).end()
        log.warning("rank %d stays missing: the new process for it cannot be taken in: %s", self._home[local], why)

    def agreed(self, again: Again) -> None:
        """The ranks have other numbers from now on, and some may have been taken in.

        One that has ended meanwhile is missed by the controller.
        """
        if NEW not in again.members:
            self._planned = {}
            self._seats = [self._seats[before] for before in again.members]
            return
        filled = self._planned.get(again.members)
        self._planned = {}
        self._seats = filled or list(range(len(again.members)))  # those that are not planned here are not asked for
        seats = {self._home[local]: local for local in self._missing if local in self._coming and filled}
        for number, before in enumerate(again.members):
            if before == NEW and (local := seats.get(self._seats[number])) is not None:
                self._take_in(local, number, again)

    def _take_in(self, local: int, number: int, again: Again) -> None:
        """From now on it is a rank like all others; if it is gone already, torch is to see that."""
        newcomer, context = self._coming.pop(local), self._context
        own = msgspec.structs.replace(again.for_rank(NEW), rank=number, aux={}, ends=())
        with contextlib.suppress(OSError):
            newcomer.take_in(msgspec.json.encode(own))
        context.subprocess_handlers[local] = newcomer.handler
        context._failures.pop(local, None)
        context._running_local_ranks.add(local)
        worker = self._group.workers[local]
        worker.id, worker.global_rank = newcomer.handler.proc.pid, number
        with contextlib.suppress(OSError):
            os.unlink(context.error_files[local])
        log.info("rank %d is taken in, process %d", number, newcomer.handler.proc.pid)

    def close(self) -> None:
        """End those that were not taken in; idempotent."""
        while self._coming:
            self._coming.popitem()[1].end()
        self._hopeless.update(self._home)
        if self.host is not None:
            self.host.close()
