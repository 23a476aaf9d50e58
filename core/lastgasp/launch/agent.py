"""torchrun's agent, extended rather than edited: it holds its signals back until the survivors have saved.

Built on the overridable methods of LocalElasticAgent (torch 2.6 to 2.13, docs/facts/torchrun.md).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousGracefulExitError

from lastgasp import _clock, exitcodes
from lastgasp.gasp.joining import JOINS
from lastgasp.gasp.keeper import BufferKeeper
from lastgasp.gasp.process_monitor import describe_exit
from lastgasp.gasp.resetfile import ResetWatch
from lastgasp.launch import framework_verdict, orphans
from lastgasp.launch.attempts import LEAVE, LaunchAttempt, LaunchAttempts, ours
from lastgasp.launch.bounded import NodesWaiting
from lastgasp.launch.exitbarrier import wait_for_living
from lastgasp.launch.fewer import asked, least_ranks
from lastgasp.launch.finishing import FINISH, REST, let_finish
from lastgasp.launch.forward import Forwarder
from lastgasp.launch.growth import MISSING, CodeFile, Newcomer, joins
from lastgasp.launch.guest import Guest, invited
from lastgasp.launch.in_place import GivenUp, GoesOn, InPlace, until_it_goes_on
from lastgasp.launch.joblog import JobLog
from lastgasp.launch.lost import line, lost_rendezvous, never_taken_in, spare, tell_success
from lastgasp.launch.missing import Waiting, hosts_in, is_alone
from lastgasp.launch.numbers import max_restarts_given
from lastgasp.launch.older_torch import shut_down
from lastgasp.launch.restarts import DEFAULT_MAX_RESTARTS, Restarts
from lastgasp.launch.stop_signals import StopSignals, stop_this_launcher
from lastgasp.launch.stores import guard_connections, tell_newcomers
from lastgasp.launch.warm import Warm
from lastgasp.launch.warm_torch import differs, forking, ranks_of
from lastgasp.nccl import left_alone
from lastgasp.output import UNREAD, why_lost, write_error
from lastgasp.steps.recover import recover_orphans

log = logging.getLogger("lastgasp.launch")

POLL = 0.005
"""Seconds between two checks of the workers while the agent holds its signals back."""
MARKS_LIMIT = 5.0
"""Seconds that writing the last step marks of killed workers may take."""

last_ending = ""
"""How the last recovery led by this process has ended (events.Ending); empty if there was none."""


class GaspAgent(LocalElasticAgent):
    """One per node. The one with group rank 0 hosts the controller."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked, self._attempts = asked(), LaunchAttempts()
        self._restarts = Restarts(always=ours())
        self._attempt: LaunchAttempt | None = None
        self._mark = ""
        self._job_log = JobLog()
        self._hosts: Counter[str] | None = None
        self._ever_used = False
        self._stopping, self._signals = threading.Event(), StopSignals()
        self._warm, self._code = Warm(), CodeFile()
        self._in_place: InPlace | None = None
        self._guest: Guest | None = None
        self._taken_in = False
        self._keeper: BufferKeeper | None = None
        self._warm.why = self._warm.why or differs()
        self._outlive_the_store()

    # -- start ------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """As torch's, which waits for the other hosts; a job that uses lastgasp logs which hosts it waits for."""
        guard_connections()
        self._ever_used = self._ever_used or self._in_use()
        self._say_event("restarting")  # another host's launcher waits, and torch has not judged the ranks
        self._attempts.end_attempt()
        self._attempt = None
        if self._in_place is not None:
            self._in_place.close()
        handler = worker_group.spec.rdzv_handler
        waiting = Waiting(handler, self._hosts, lambda: self._attempts.last_word.safe)
        first = self._in_place is None
        self._guest = invited(worker_group.spec) if first and not is_alone(handler) else None
        if self._guest is not None:
            self._guest.take_place(worker_group, worker_group.spec)
            self._store = worker_group.store
        else:
            with waiting if self._is_ours() and not is_alone(handler) else nullcontext():
                super()._rendezvous(worker_group)
        self._hosts = hosts_in(handler)

    def _assign_worker_ranks(self, store: Any, rank: int, size: int, spec: WorkerSpec) -> list[Worker]:
        guard_connections()
        handler = spec.rdzv_handler
        if rank == 0 and self._is_ours():
            tell_newcomers(store, handler)
        self._attempts.offer(store, rank, size, handler.get_run_id(), handler.get_backend() != "static")
        workers: list[Worker] = super()._assign_worker_ranks(store, rank, size, spec)
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        recover_orphans(MARKS_LIMIT)
        rdzv = worker_group.spec.rdzv_handler
        self._attempt = self._attempts.begin(
            worker_group, rdzv.get_run_id(), fresh_store=rdzv.get_backend() != "static"
        )
        self._keeper = self._attempt.keeper or self._keeper
        self._taken_in = self._taken_in or self._guest is None
        if self._attempt.number > 0 and self._attempt.led and rdzv.use_agent_store:
            self._fresh_store(worker_group, self._attempt)
        mark = self._mark
        self._reap(worker_group)
        if mark and not self._mark and self._is_ours():
            orphans.tell_of_others(mark, self._warm.pid)
        self._mark = orphans.new_mark()
        self._stopping.clear()
        least = least_ranks(self._asked, rdzv, len(worker_group.workers), worker_group.group_world_size or 1)
        own = {orphans.MARK: self._mark} | self._warm.begin() | self._code.begin(least > 0) | left_alone(os.environ)
        pipes = {} if self._guest is None else {n: Newcomer.pipes() for n in range(len(worker_group.workers))}
        if pipes:
            own[JOINS] = ";".join(joins(local, theirs) for local, (_, _, theirs) in pipes.items())
        self._attempts.export(self._attempt.environment | own)
        with forking(self._warm):
            started: dict[int, Any] = super()._start_workers(worker_group)
        self._signals.take_over()
        os.environ.pop(JOINS, None)
        self._attempt.report_start(str(self._warm.start))
        self._in_place = InPlace(
            self._attempt, worker_group, self._pcontext, self._warm, max(least, bool(pipes)), code=self._code
        )
        if isinstance(self._pcontext, SubprocessContext) and pipes:
            handlers = self._pcontext.subprocess_handlers
            self._in_place.come({local: Newcomer(handlers[local], *found) for local, found in pipes.items()})
        self._hold_before_closing(worker_group)
        return started

    def _reap(self, worker_group: WorkerGroup) -> None:
        """End processes left by the workers of the previous attempt, once all of those workers have ended."""
        if self._in_place is not None:
            self._in_place.close()
        if self._mark and not self._running(worker_group):
            orphans.reap(self._mark, worker_group.spec.args if isinstance(worker_group.spec.entrypoint, str) else ())
            self._mark = ""

    def _hold_before_closing(self, worker_group: WorkerGroup) -> None:
        """Hold where torch sends its signals, so that no failure slips in between a check and the signals."""
        context = self._pcontext
        assert context is not None
        close = context.close

        def hold_and_close(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            self._signals.at_once()
            if death_sig is None and self._in_use():  # torch has seen a worker fail
                self._allow_restarts(worker_group)
                if self._hold(worker_group):
                    raise GoesOn
            elif death_sig is None and self._in_place is not None:
                self._in_place.report_exits(self._failed(worker_group))
            close(death_sig, timeout)

        vars(context)["close"] = hold_and_close
        if isinstance(context, SubprocessContext):
            vars(context)["_poll"] = until_it_goes_on(context._poll)

    def _fresh_store(self, worker_group: WorkerGroup, current: LaunchAttempt) -> None:
        """Give the attempt a store of its own.

        torch 2.13 reuses the agent's store without a prefix, and the new ranks then read the dead
        attempt's gloo addresses (docs/facts/megatron.md §3).
        """
        assert worker_group.master_addr is not None
        key = f"lastgasp/store/{current.number}"
        if worker_group.group_rank == 0:
            self._worker_store = TCPStore(
                worker_group.master_addr, 0, is_master=True, wait_for_workers=False, multi_tenant=True
            )
            worker_group.master_port = self._worker_store.port
            if worker_group.group_world_size > 1:
                worker_group.store.set(key, f"{worker_group.master_addr} {worker_group.master_port}")
        else:  # torch keeps the previous attempt's address, which may be another host's
            worker_group.master_addr, port = worker_group.store.get(key).decode().split()
            worker_group.master_port = int(port)

    # -- watch ------------------------------------------------------------------------------------

    def _in_use(self) -> bool:
        return self._attempt is not None and self._attempt.in_use()

    def _outlive_the_store(self) -> None:
        """Let ranks that have completed their training exit on their own, even if the rendezvous is gone.

        torch queries it at every check of the workers, and would stop them. While its host does not answer, nobody
        is known to wait, and the workers are looked at.
        """
        handler = self._worker_group.spec.rdzv_handler
        ask, bounded = handler.num_nodes_waiting, NodesWaiting(handler.num_nodes_waiting)

        def nodes_waiting() -> int:
            try:
                return int(bounded() if self._in_use() else ask())
            except (RendezvousError, DistError):
                if not self._all_left():
                    raise
                return 0

        vars(handler)["num_nodes_waiting"] = nodes_waiting

    def _ended_well(self) -> bool:
        """All ranks of this host have completed their training, and all that they did behind it."""
        codes = self._codes(self._worker_group)
        return set(codes.values()) == {0} and self._attempt is not None and self._attempt.have_left(codes)

    def _all_left(self, failed: Iterable[int] = ()) -> bool:
        """Whether all that run have completed their training; where none runs, all of `failed`."""
        running = [rank for rank, code in self._codes(self._worker_group).items() if code is None]
        return self._attempt is not None and self._attempt.have_left(running or failed)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._guest is not None:
            self._wait_as_guest(self._guest, worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        with self._signals:
            return self._look(worker_group)

    def _look(self, worker_group: WorkerGroup) -> RunResult:
        # Under plain torchrun, unprotected ranks leave torchrun's own rule as it is.
        used = self._in_use() or (ours() and self._attempt is not None and self._attempt.joined())
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._judge(used, frozenset(failure.exitcode for failure in result.failures.values()))
        elif result.state is WorkerState.HEALTHY and (ranks := ranks_of(self._pcontext)) is not None:
            assert self._in_place is not None
            self._warm.look(ranks)
            self._in_place.look()
        return result

    def _wait_as_guest(self, guest: Guest, worker_group: WorkerGroup) -> None:
        """The ranks of this host, which has come back, wait to be taken in; else it joins the rendezvous, as ever."""
        assert self._in_place is not None
        try:
            if self._in_place.taken_in(guest):
                self._guest, self._taken_in = None, True
        except (GivenUp, DistError, RuntimeError) as error:
            if guest.ended:
                raise RendezvousGracefulExitError from error  # as torch does for a spare
            log.warning("this host is not taken in without a restart: %s", line(error))
            self._restart_workers(worker_group)

    def _hold(self, worker_group: WorkerGroup) -> bool:
        """Keep torchrun's SIGTERM back until the survivors have saved and exited, or a deadline has passed.

        Returns:
            Whether the dead ranks were replaced, and nobody is to be stopped.
        """
        assert self._attempt is not None and self._in_place is not None
        known: set[int] = set()
        start, limit = _clock.monotonic(), self._attempt.hold_limit()
        while _clock.monotonic() < start + limit:
            self._in_place.offer_in_time()
            failed = self._failed(worker_group)
            for rank in failed.keys() - known:
                self._in_place.report_exit(rank, failed[rank], self._pid(worker_group, rank))
            known |= failed.keys()
            if failed and self._all_left(failed):  # no recovery; torch would not wait
                limit = min(limit, _clock.monotonic() - start + FINISH)
            if self._in_place.replaced(failed):
                return True
            over = self._attempt.over_for()
            waits = self._running(worker_group) or (failed and self._in_place.undecided)
            if not waits or (over is not None and over > LEAVE) or self._in_place.nobody_comes:
                return False
            time.sleep(POLL)
        if self._running(worker_group):
            log.error("the survivors did not finish within %g s: stopping them", limit)
        return False

    @staticmethod
    def _pid(worker_group: WorkerGroup, rank: int) -> int:
        return next((int(worker.id) for worker in worker_group.workers if worker.global_rank == rank), 0)

    def _codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        """Exit code by global rank; None while it runs."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            codes = {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
        elif isinstance(context, MultiprocessContext) and context._pc is not None:
            codes = {local: process.exitcode for local, process in enumerate(context._pc.processes)}
        else:
            codes = {}
        found = {worker_group.workers[local].global_rank: code for local, code in codes.items()}
        found.pop(MISSING, None)
        return found

    def _failed(self, worker_group: WorkerGroup) -> dict[int, str]:
        codes = self._codes(worker_group)
        return {rank: describe_exit(code) for rank, code in codes.items() if code is not None and code != 0}

    def _running(self, worker_group: WorkerGroup) -> bool:
        return any(code is None for code in self._codes(worker_group).values())

    # -- restart or stop --------------------------------------------------------------------------

    def _allow_restarts(self, worker_group: WorkerGroup) -> None:
        """torchrun's own default is no restart at all; a lastgasp job restarts unless the user says otherwise."""
        spec = worker_group.spec
        if spec.max_restarts == 0 and not max_restarts_given():
            spec.max_restarts = self._remaining_restarts = DEFAULT_MAX_RESTARTS

    def _judge(self, used: bool, codes: frozenset[int]) -> None:
        assert self._attempt is not None
        current, restarts = self._attempt, self._restarts
        restarts.left, restarts.repeats, restarts.completed = current.leaves(), current.repeats(), current.completed()
        restarts.over = self._keeper.over if self._keeper is not None else None
        restarts.verdict_of_framework = framework_verdict.take(self._mark) or self._unread(codes)
        restarts.elsewhere = exitcodes.REFUSED not in codes and current.refused_elsewhere()
        refused = restarts.elsewhere or exitcodes.REFUSED in codes
        restarts.ended(current.number, used, current.progressed(refused), refused, codes)
        if restarts.should_give_up:
            self._remaining_restarts = 0
            if current.controller is not None and not restarts.refused:  # of that all have been told
                current.controller.end_job(restarts.exit_code, restarts.verdict)
        maximum = self._worker_group.spec.max_restarts
        again = self._job_log.restarting(maximum - self._remaining_restarts + 1, maximum)
        self._say_event(again if self._remaining_restarts > 0 else "stopping", self._restarts.behind)

    def _unread(self, codes: frozenset[int]) -> framework_verdict.Verdict | None:
        """The end of a job that has written where nothing arrives any more; each new attempt would do the same."""
        codes |= {code for code in self._codes(self._worker_group).values() if code}  # torch has those of the first
        why = why_lost(self._restarts.repeats.cause) if codes & UNREAD and self._is_ours() else ""
        if self._attempt is None or not why:
            return None
        ending = exitcodes.of_ending(self._attempt.last_word().ending)
        return framework_verdict.Verdict(code=ending or 1, why=why)

    def _say_event(self, then: str, behind: str = "") -> None:
        if self._attempt is not None:
            self._job_log.recovery(self._attempt.number, self._attempt.event(), then, behind)

    def _shutdown(
        self, death_sig: signal.Signals | None = None, timeout: int = 30, is_restart: bool = False
    ) -> None:
        """As torch's, which gives `death_sig` where this launcher was asked to stop."""
        self._stopping.set()
        if self._in_place is not None:
            self._in_place.close()
        if self._attempt is not None and self._in_use():
            if over := self._all_left() and death_sig is not None:
                let_finish(lambda: self._running(self._worker_group))
            timeout = REST if over else max(timeout, int(self._attempt.end_limit()))
            death_sig = signal.SIGTERM  # Ctrl-C, too: a stuck rank would never raise its KeyboardInterrupt
        keep = is_restart or self._is_ours()
        shut_down(super()._shutdown, self._pcontext, death_sig or signal.SIGTERM, timeout, keep)

    def _exit_barrier(self) -> None:
        """As torch's, which also waits for launchers that were killed: here the first launcher stops that wait."""
        size, current = self._worker_group.group_world_size or 1, self._attempt
        if self._in_place is not None:
            self._in_place.job_ended()
        if current is not None and current.controller is not None and size > 1:
            self._in_exit_barrier = True  # read by torch's health check
            deadline = _clock.monotonic() + self._exit_barrier_timeout
            if gone := wait_for_living(self._store, size, current.living_launchers, self._exit_barrier_timeout):
                log.warning("%d of %d launchers have died before the end: not waiting for them", gone, size)
            self._exit_barrier_timeout = max(1.0, deadline - _clock.monotonic())
        super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _is_ours(self) -> bool:
        """Started by `lastgasp run`, or its ranks, or those of who has invited it, use lastgasp: other jobs under
        torchrun see no difference."""
        return ours() or self._ever_used or self._in_use() or self._guest is not None

    def _to_be_told(self) -> list[int]:
        """Process ids of this host's running ranks that use lastgasp."""
        if self._attempt is None:
            return []
        entries = self._attempt.desk.entries
        codes = self._codes(self._worker_group)
        return [entry.pid for rank, entry in entries.items() if codes.get(rank, 0) is None and not entry.left]

    def run(self, role: str = "default") -> RunResult:
        """Run to the end; a job that makes no progress, or loses its rendezvous, ends with a code that says so."""
        global last_ending
        ending, stopped = "stopped", False
        reset = ResetWatch(stop_this_launcher, when=self._is_ours)
        forwarder = Forwarder(self._stopping, self._to_be_told)
        lost: Exception | None = None
        try:
            result: RunResult | None = super().run(role)
            if result is not None and result.state is WorkerState.SUCCEEDED:
                self._mark, ending = "", "done"  # processes left by a successful job are intentional
                tell_success(self._worker_group.spec.rdzv_handler, wait=ours())
        except SignalException:
            if not self._ended_well():
                raise
            self._mark, ending, stopped = "", "done", True
        except (RendezvousError, DistError) as error:
            lost = error
        finally:
            forwarder.close()
            self._warm.close()
            self._say_event("training was complete" if ending == "done" else "stopping")
            self._job_log.ended(self._attempts.summary(ending))
            reset.close()
            self._reap(self._worker_group)
            used = self._ever_used or self._in_use()
            last_ending = self._attempts.close()
            recover_orphans(MARKS_LIMIT)
        if stopped:
            raise SystemExit(0)
        if lost is not None and self._attempts.refused_elsewhere:
            self._restarts.refused = self._restarts.elsewhere = True
        elif lost is not None and self._keeper is not None and self._keeper.over is not None:
            self._restarts.over = self._keeper.over
        elif lost is not None:
            raise self._without_rendezvous(lost, used) from lost
        if self._restarts.should_give_up:
            write_error(f"lastgasp: {self._restarts.verdict}")
            raise SystemExit(self._restarts.exit_code)
        if result is None and self._is_ours():
            ended = self._guest is not None and self._guest.ended
            raise spare(self._worker_group.spec.rdzv_handler, ended)
        return result  # type: ignore[return-value]  # torch's own of a spare is None, too

    def _without_rendezvous(self, error: Exception, used: bool) -> BaseException:
        """The exception to raise instead: torch's own error for a job that does not use lastgasp."""
        word = self._attempts.last_word
        code = exitcodes.of_ending(word.ending)
        if not self._taken_in and self._is_ours():
            return never_taken_in(error, self._worker_group.spec.rdzv_handler) or error
        if not used or code is None:
            return error
        write_error(f"lastgasp: {lost_rendezvous(error, self._hosts, word.safe)}")
        return SystemExit(code)
