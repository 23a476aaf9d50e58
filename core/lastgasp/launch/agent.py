"""torchrun's agent, extended and not edited: it holds its signals until the survivors have saved.

Built on the overridable methods of LocalElasticAgent (torch 2.13, facts/torchrun.md).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext

from lastgasp import _clock, exitcodes
from lastgasp.gasp.deathwatch import describe_exit
from lastgasp.gasp.resetfile import ResetWatch
from lastgasp.launch import framework_verdict, orphans
from lastgasp.launch.joblog import JobLog
from lastgasp.launch.restarts import DEFAULT_MAX_RESTARTS, Restarts
from lastgasp.launch.rounds import Round, Rounds
from lastgasp.steps.recover import recover_orphans

log = logging.getLogger("lastgasp.launch")

POLL = 0.005
"""Seconds between two looks at the workers while the agent holds."""
LEAVE = 15.0
"""Seconds that released workers get to leave by themselves, their own clean-up included."""
MARKS_LIMIT = 5.0
"""Seconds that writing the last step marks of killed workers may take."""


last_ending = ""
"""How the last recovery that this process led has ended (events.Ending), empty when there was none."""


class GaspAgent(LocalElasticAgent):
    """One per node. The one with group rank 0 hosts the controller."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rounds = Rounds()
        self._restarts = Restarts(always=os.environ.get("LASTGASP_LAUNCHER") == "run")
        self._round: Round | None = None
        self._mark = ""
        self._job_log = JobLog()

    # -- start ------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        recover_orphans(MARKS_LIMIT)
        rdzv = worker_group.spec.rdzv_handler
        self._round = self._rounds.begin(worker_group, rdzv.get_run_id(), fresh_store=rdzv.get_backend() != "static")
        if self._round.number > 0 and rdzv.use_agent_store:
            self._fresh_store(worker_group, self._round)
        self._reap(worker_group)
        self._mark = orphans.new_mark()
        os.environ.update(self._round.environment | {orphans.MARK: self._mark})
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._hold_before_closing(worker_group)
        return started

    def _reap(self, worker_group: WorkerGroup) -> None:
        """End what the workers of the round before have left; they have all ended."""
        if self._mark:
            orphans.reap(self._mark, worker_group.spec.args if isinstance(worker_group.spec.entrypoint, str) else ())
        self._mark = ""

    def _hold_before_closing(self, worker_group: WorkerGroup) -> None:
        """Put the hold where torch decides to send its signals: nothing can fail between a look and that."""
        context = self._pcontext
        assert context is not None
        close = context.close

        def hold_and_close(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            if death_sig is None and self._round is not None and self._round.in_use():  # torch saw a worker fail
                self._allow_restarts(worker_group)
                self._hold(worker_group)
            close(death_sig, timeout)

        vars(context)["close"] = hold_and_close

    def _fresh_store(self, worker_group: WorkerGroup, current: Round) -> None:
        """Give the attempt a store of its own.

        torch 2.13 reuses the agent's store without a prefix, and the new ranks then read the dead
        attempt's gloo addresses (facts/megatron.md §3).
        """
        assert worker_group.master_addr is not None
        key = f"lastgasp/store/{current.number}"
        if worker_group.group_rank == 0:
            self._worker_store = TCPStore(
                worker_group.master_addr, 0, is_master=True, wait_for_workers=False, multi_tenant=True
            )
            port = self._worker_store.port
            if worker_group.group_world_size > 1:
                worker_group.store.set(key, str(port))
        else:
            port = int(worker_group.store.get(key))
        worker_group.master_port = port

    # -- watch ------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        used = self._round is not None and self._round.in_use()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            refused = any(failure.exitcode == exitcodes.REFUSED for failure in result.failures.values())
            self._judge(used, refused)
        return result

    def _hold(self, worker_group: WorkerGroup) -> None:
        """Keep torchrun's SIGTERM back until the survivors have saved and left, or a deadline passed."""
        assert self._round is not None
        known: set[int] = set()
        deadline = _clock.monotonic() + self._round.hold_limit()
        while _clock.monotonic() < deadline:
            failed = self._failed(worker_group)
            for rank in failed.keys() - known:
                self._round.report_exit(rank, failed[rank])
            known |= failed.keys()
            over = self._round.over_for()
            if not self._running(worker_group) or (over is not None and over > LEAVE):
                return
            time.sleep(POLL)
        log.error("the survivors did not finish within %g s: stopping them", self._round.hold_limit())

    def _codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        """Exit code by global rank; None while it runs."""
        context = self._pcontext
        if isinstance(context, SubprocessContext):
            codes = {local: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
        elif isinstance(context, MultiprocessContext) and context._pc is not None:
            codes = {local: process.exitcode for local, process in enumerate(context._pc.processes)}
        else:
            codes = {}
        return {worker_group.workers[local].global_rank: code for local, code in codes.items()}

    def _failed(self, worker_group: WorkerGroup) -> dict[int, str]:
        codes = self._codes(worker_group)
        return {rank: describe_exit(code) for rank, code in codes.items() if code is not None and code != 0}

    def _running(self, worker_group: WorkerGroup) -> bool:
        return any(code is None for code in self._codes(worker_group).values())

    # -- restart or stop --------------------------------------------------------------------------

    def _allow_restarts(self, worker_group: WorkerGroup) -> None:
        """torchrun's own default is no restart at all; a lastgasp job restarts unless told otherwise."""
        spec = worker_group.spec
        if spec.max_restarts == 0 and not _max_restarts_given():
            spec.max_restarts = self._remaining_restarts = DEFAULT_MAX_RESTARTS

    def _judge(self, used: bool, refused: bool) -> None:
        assert self._round is not None
        self._restarts.verdict_of_framework = framework_verdict.take(self._mark)
        self._restarts.ended(self._round.number, used, self._round.progressed(), refused)
        if self._restarts.hopeless:
            self._remaining_restarts = 0
        maximum = self._worker_group.spec.max_restarts
        again = self._job_log.restarting(maximum - self._remaining_restarts + 1, maximum)
        self._say_event(again if self._remaining_restarts > 0 else "stopping")

    def _say_event(self, then: str) -> None:
        if self._round is not None:
            self._job_log.recovery(self._round.number, self._round.event(), then)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._round is not None and self._round.in_use():
            timeout = max(timeout, int(self._round.hold_limit()))
            death_sig = signal.SIGTERM  # Ctrl-C, too: a stuck rank would never raise its KeyboardInterrupt
        super()._shutdown(death_sig, timeout)

    def _is_ours(self) -> bool:
        """Started by `lastgasp run`, or its ranks use lastgasp: any other job under torchrun sees no difference."""
        current = self._round
        try:
            return os.environ.get("LASTGASP_LAUNCHER") == "run" or (current is not None and current.in_use())
        except RuntimeError:  # the rendezvous store went with its node
            return False

    def run(self, role: str = "default") -> RunResult:
        """Run to the end; a job that makes no progress ends with its own exit code."""
        global last_ending
        ending = "stopped"
        reset = ResetWatch(_stop_this_launcher, when=self._is_ours)
        try:
            result: RunResult = super().run(role)
            if result.state is WorkerState.SUCCEEDED:
                self._mark = ""  # what a good job leaves running, it means to
                ending = "done"
        finally:
            self._say_event("stopping")
            self._job_log.ended(self._rounds.summary(ending))
            reset.close()
            self._reap(self._worker_group)
            last_ending = self._rounds.close()
            recover_orphans(MARKS_LIMIT)
        if self._restarts.hopeless:
            sys.stderr.write(f"lastgasp: {self._restarts.verdict}\n")
            raise SystemExit(self._restarts.exit_code)
        return result


def _stop_this_launcher() -> None:
    """As whoever stops the job does: the ranks save, and the launcher ends with the code that says so."""
    os.kill(os.getpid(), signal.SIGTERM)


def _max_restarts_given() -> bool:
    names = ("--max-restarts", "--max_restarts")
    return "PET_MAX_RESTARTS" in os.environ or any(arg.split("=")[0] in names for arg in sys.argv[1:])
