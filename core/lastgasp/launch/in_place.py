"""The launcher's part of a recovery in place: a store where the ranks meet again, and new processes for dead ranks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lastgasp.gasp import messages as m
from lastgasp.gasp.again import LAUNCHER, NEW, NOT_REPLACED, ORDER, Again, Offer
from lastgasp.gasp.serve import ControllerThread
from lastgasp.launch.attempts import LaunchAttempt
from lastgasp.launch.growth import MISSING, CodeFile, Growth, Newcomer
from lastgasp.launch.guest import Guest, Host
from lastgasp.launch.orphans import reap_session
from lastgasp.launch.warm import Warm
from lastgasp.launch.warm_process import NoFork
from lastgasp.launch.warm_torch import replacement

log = logging.getLogger("lastgasp.launch")


class GoesOn(Exception):
    """Leaves torch's look at its workers: the dead one was replaced, and the others are to be left alone."""


class GivenUp(Exception):
    """The ranks of a host that has come back are not taken in; why is its text."""


def until_it_goes_on(poll: Callable[[], Any]) -> Callable[[], Any]:
    """torch's look at its workers, which sees none that has failed where the dead ones were replaced."""

    def look() -> Any:
        try:
            return poll()
        except GoesOn:
            return None

    return look


class InPlace:
    """One per attempt; all of it is called on the launcher's main thread.

    The first node's launcher has the controller; all others hear from it by their keepers.

    Args:
        attempt: as the launcher counts it.
        group: its workers; context: their processes.
        least: with how many ranks it may go on; 0: with no less than it has. Then they may also become more again.
        code: in which its ranks say what code they run.
    """

    def __init__(
        self, attempt: LaunchAttempt, group: WorkerGroup, context: Any, warm: Warm, least: int = 0,
        *, code: CodeFile | None = None,
    ) -> None:  # fmt: skip
        self._least = least
        self._growth = Growth(group, context, warm, code) if code is not None else None
        several = (group.group_world_size or 1) > 1
        if self._growth is not None and least and attempt.controller is not None and several:
            desk = attempt.desk
            self._growth.host = Host(group, lambda: next((one.directory for one in desk.entries.values()), ""))
        self._attempt, self._group, self._context, self._warm = attempt, group, context, warm
        self._stores: dict[int, TCPStore] = {}
        self._offered: Offer | None = None
        self._done = 0
        self._new = set[int]()
        """Ranks that have got new processes in that incarnation."""
        self._killed: tuple[int, tuple[int, ...]] = (0, ())
        self._replaces: set[int] = set()
        """Processes that were killed here to be replaced: their end is known."""
        self._numbers: dict[str, str] = {}
        """What new processes get besides, where ranks have other numbers than they were started with."""
        if attempt.controller is not None and isinstance(context, SubprocessContext):
            attempt.controller.offers(attempt.number)

    def look(self) -> None:
        """Between two looks at the workers: offer what can be done, once some rank can be entered again."""
        attempt = self._attempt
        if not isinstance(self._context, SubprocessContext):
            return
        self._number_anew()
        self._kill_lost()
        if attempt.controller is not None:
            self._offer(attempt.controller)
        elif attempt.keeper is not None:
            attempt.keeper.can_fork(m.Forks(attempt=attempt.number, cannot=self._warm.cannot_fork))
            for rank in attempt.out_of_reach & {worker.global_rank for worker in self._group.workers}:
                self._kill(rank, "does not hear that the recovery is over")

    def offer_in_time(self) -> None:
        """A rank has ended before the first look at its incarnation: the others wait for what can be done."""
        controller = self._attempt.controller
        if controller is None or not isinstance(self._context, SubprocessContext):
            return
        if controller.awaits_offer(self._attempt.number):
            self._offer(controller, grows=False)

    def _offer(self, controller: ControllerThread, grows: bool = True) -> None:
        attempt, others = self._attempt, (self._group.group_world_size or 1) - 1
        several = others > 0
        if self._numbers:  # those that were lost with their ranks are not waited for
            others -= controller.missing(attempt.number, others)
        coming = controller.may_enter_again(attempt.number)
        if coming is None:
            return
        host = controller.endpoint.host if several else ""
        if coming not in self._stores:
            self._stores = {n: store for n, store in self._stores.items() if n == coming - 1}
            where = host or self._group.master_addr or "localhost"
            self._stores[coming] = TCPStore(where, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        elsewhere = controller.no_process(attempt.number, others)
        offer = Offer(
            attempt=attempt.number,
            incarnation=coming,
            port=self._stores[coming].port,
            host=host,
            others=others,
            no_process=self._warm.cannot_fork or elsewhere,
            least=self._least,
            grow=self._grow(controller, coming) if grows else (),
            complete=self._group.workers[0].world_size,
        )
        if offer != self._offered or controller.awaits_offer(attempt.number):  # it may be another training's
            self._offered = offer
            controller.offer(offer)
            log.debug("a fault can be answered in place, as incarnation %d%s", coming,
                      offer.no_process and f"; no rank can be replaced: {offer.no_process}")  # fmt: skip

    def _grow(self, controller: ControllerThread, coming: int) -> tuple[int, ...]:
        """`Offer.grow`, once this launcher counts its ranks as those do that run now."""
        again, growth = self._agreed(), self._growth
        if growth is None or again is None or again.incarnation != coming - 1:
            return ()
        if again.members and again.incarnation > self._done:
            return ()
        return growth.look(controller.not_grown(self._attempt.number))

    def come(self, newcomers: dict[int, Newcomer]) -> None:
        """This host has come back: its ranks wait to be taken in."""
        if self._growth is not None:
            self._growth.came(newcomers)

    def taken_in(self, guest: Guest) -> bool:
        """Whether the ranks of this host, which has come back, are ranks like all others from now on.

        Raises:
            GivenUp: they will not be.
        """
        growth, again = self._growth, self._agreed()
        if growth is None or self._attempt.keeper is None:
            raise GivenUp("the job has no controller")
        if again is not None and NEW in again.members and growth.planned(guest, again.members):
            self._done = again.incarnation
            self._number(again)
            return True
        if why := growth.wait(guest):
            raise GivenUp(why)
        return False

    def job_ended(self) -> None:
        """All ranks of this host have ended well: nobody is taken in any more."""
        if self._growth is not None and self._growth.host is not None:
            self._growth.host.end()

    def close(self) -> None:
        """The ranks of the attempt are to end, or have; idempotent."""
        if self._growth is not None:
            self._growth.close()

    def _kill_lost(self) -> None:
        """A rank of this host that gets a new process may still run: it hangs, does not leave its training, or was cut
        off. Those that a controller of this host sees are ended by it, and where another backend leads none is."""
        again = self._agreed()
        if again is None or not self._needed(again) or (again.incarnation, again.lost) == self._killed:
            return
        if self._attempt.controller is not None and not again.port:
            return
        self._killed = again.incarnation, again.lost
        for rank in self._needed(again):
            seen = (pid := self._process(rank).pid) in again.pids
            if seen and self._attempt.controller is not None:
                continue
            if self._kill(rank, "gets a new process") and not seen:
                self._replaces.add(pid)

    def _process(self, rank: int) -> Any:
        return self._context.subprocess_handlers[self._local(rank)].proc

    def _kill(self, rank: int, which: str) -> bool:
        """Returns whether its process was still there."""
        process = self._process(rank)
        if process.poll() is not None:
            return False
        log.warning("killing rank %d, which %s", rank, which)
        process.kill()
        return True

    @property
    def undecided(self) -> bool:
        """No rank of this host runs, but those of other hosts may go on in place with new processes here."""
        attempt, again = self._attempt, self._agreed()
        if self._group.group_world_size == 1:
            return False
        if again is not None and self._needed(again):
            return True
        if attempt.controller is not None:
            return attempt.controller.may_enter_again(attempt.number) is not None and attempt.over_for() is None
        keeper = attempt.keeper
        if keeper is None or not keeper.connected:
            return False
        agreed = keeper.agreed
        return agreed is None or agreed.attempt != attempt.number or agreed.ending in ("in_place", "open")

    @property
    def nobody_comes(self) -> bool:
        """The new processes of this host would wait in vain: those that were to enter with them have ended since, or
        the others save for a restart."""
        attempt = self._attempt
        if attempt.controller is not None and attempt.controller.nobody_comes(attempt.number):
            return True
        if not self._new or not attempt.ended():
            return False
        ranks = [worker.global_rank for worker in self._group.workers]
        running = {rank for rank in ranks if self._process(rank).poll() is None}
        return running <= self._new and not any(self._joined(rank) for rank in running)

    def _joined(self, rank: int) -> bool:
        entry = self._attempt.desk.entries.get(rank)  # else it is its predecessor's
        return entry is not None and entry.pid == self._process(rank).pid

    def replaced(self, failed: dict[int, str]) -> bool:
        """Give each dead rank a new process, if that was agreed on.

        Args:
            failed: the dead ranks of this host, and how they ended.

        Returns:
            False where it was not (yet), or failed; the controller knows then, and the step is saved.
        """
        again = self._agreed()
        if again is None or (again.incarnation <= self._done and not self._needed(again)):
            return False
        self._kill_lost()
        lost = self._needed(again)
        if again.members and lost <= set(failed):
            self._leave_out(lost, again)
            return lost == set(failed)  # another one has its number by now, and is waited for
        if set(failed) != lost:
            return False
        self._new = lost | (self._new if again.incarnation == self._done else set())
        self._done = again.incarnation
        try:
            if failed and (why := self._warm.changed):
                raise NoFork(why)
            for rank in failed:
                self._replace(rank, again)
        except (NoFork, OSError) as error:
            log.warning("a rank could not be replaced: %s", error)
            for rank in failed:
                self._report(rank, f"{NOT_REPLACED}{error}", self._done)
            return False
        return True

    def _leave_out(self, lost: Iterable[int], again: Again) -> None:
        """These ranks of this host are missing from now on: torch is not to see that they have ended."""
        self._done = again.incarnation
        for rank in lost:
            local = self._local(rank)
            self._context._failures.pop(local, None)
            self._context._running_local_ranks.discard(local)
            log.info("rank %d is missing from now on", rank)
        self._number(again)

    def _number_anew(self) -> None:
        """Ranks of other hosts are missing from now on, or some are there again: others may have got other numbers."""
        again = self._agreed()
        if again is not None and again.members and again.incarnation > self._done and not self._lost(again):
            self._done = again.incarnation
            self._number(again)

    def _number(self, again: Again) -> None:
        number = again.numbers
        for worker in self._group.workers:
            worker.global_rank = number.get(worker.global_rank, MISSING)
        self._numbers = {"WORLD_SIZE": str(len(again.members))}
        if self._growth is not None:
            self._growth.agreed(again)

    def report_exit(self, rank: int, how: str, pid: int) -> None:
        """A worker of this host has ended."""
        if pid in self._replaces:
            return
        if self._attempt.controller is not None:
            self._attempt.report_exit(rank, how, pid)
        elif self._attempt.have_left([rank]):  # others may wait for it to come to the script's next training
            again = self._agreed()
            self._report(rank, how, again.incarnation if again is not None else 0)
        else:  # its connection ends as well, but does not tell how
            self._report(rank, how, self._of(rank))

    def report_exits(self, failed: Mapping[int, str]) -> None:
        """Workers have ended before any rank of this host has joined: other hosts' ranks would wait for them."""
        for rank, how in failed.items():
            self._report(rank, how, self._done)

    def _of(self, rank: int) -> int:
        """Of which incarnation a process is that has ended: of the newest one, unless that replaces it."""
        again = self._agreed()
        if again is None or again.members:
            return self._done
        return again.incarnation - (rank in self._needed(again))

    def _report(self, rank: int, how: str, incarnation: int) -> None:
        attempt = self._attempt
        if attempt.controller is not None:
            attempt.report_exit(rank, how)
        elif attempt.keeper is not None:
            number = attempt.number
            attempt.keeper.exited(m.Exited(attempt=number, incarnation=incarnation, rank=rank, how=how))

    def _agreed(self) -> Again | None:
        """The newest recovery in place of this attempt."""
        attempt, number = self._attempt, self._attempt.number
        if attempt.controller is not None:
            return attempt.controller.again(number)
        agreed = attempt.keeper.agreed if attempt.keeper is not None else None
        return agreed.again if agreed is not None and agreed.attempt == number else None

    def _lost(self, again: Again) -> set[int]:
        """The ranks of this host that get new processes."""
        return {worker.global_rank for worker in self._group.workers} & set(again.lost)

    def _needed(self, again: Again) -> set[int]:
        """Those that have none yet: a rank that does not leave its training joins the lost ones later."""
        if again.incarnation > self._done:
            return self._lost(again)
        known = again.incarnation < self._done or again.members  # whose numbers are others by now
        return set() if known else self._lost(again) - self._new

    def _local(self, rank: int) -> int:
        return next(n for n, worker in enumerate(self._group.workers) if worker.global_rank == rank)

    def _replace(self, rank: int, again: Again) -> None:
        context, spec = self._context, self._group.spec
        local = self._local(rank)
        gone = context.subprocess_handlers[local].proc.pid
        reap_session(gone, spec.args if isinstance(spec.entrypoint, str) else ())
        order = msgspec.json.encode(msgspec.structs.replace(again, aux={}, ends=())).decode()
        own = {"RANK": str(rank), **self._numbers} if self._numbers else {}
        own |= {ORDER: order, LAUNCHER: str(os.getpid())}
        handler = replacement(self._warm, context, local, again.environment | own)
        context.subprocess_handlers[local] = handler
        context._failures.pop(local, None)
        context._running_local_ranks.add(local)
        self._group.workers[local].id = handler.proc.pid
        with contextlib.suppress(OSError):
            os.unlink(context.error_files[local])
        log.info("rank %d has a new process, %d", rank, handler.proc.pid)
