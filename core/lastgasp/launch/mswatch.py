"""One job under msrun, from its first attempt to its end: watch, hold for the savers, restart all, or stop."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lastgasp import _clock, exitcodes
from lastgasp.gasp.process_monitor import describe_exit
from lastgasp.gasp.resetfile import ResetWatch
from lastgasp.launch import framework_verdict, orphans
from lastgasp.launch.joblog import JobLog
from lastgasp.launch.msattempts import MsAttempts
from lastgasp.launch.msworkers import Worker, keep_logs, wait_shown, workers_of
from lastgasp.launch.restarts import DEFAULT_MAX_RESTARTS, Restarts
from lastgasp.launch.stop_signals import stop_this_launcher
from lastgasp.steps.recover import recover_orphans

log = logging.getLogger("lastgasp.launch")

LOOK = 0.02
"""Seconds between two checks of the workers; the controller detects a death itself, and sooner."""
LEAVE = 15.0
"""Seconds for released workers to exit on their own."""
STOP = 30.0
"""Seconds for workers that do not use lastgasp to end when the job is asked to stop."""
DIE = 10.0
"""Seconds for killed workers to release their memory."""
SHOW = 1.0
"""Seconds that showing the end of the logs may take."""
SCHEDULER = 10.0
"""Seconds for msrun's scheduler to end after the last worker."""
MARKS_LIMIT = 5.0
"""Seconds that writing the last step marks of killed workers may take."""
_SAID = (exitcodes.SAVED, exitcodes.NOTHING_TO_SAVE, exitcodes.GAVE_UP)
"""Exit codes by which a rank reports how the recovery ended, also to a launcher without the controller."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Watch:
    """Runs the job when msrun hands over.

    Args:
        manager: msrun's process manager.
        args: msrun's parsed command line.

    Attributes:
        code: the launcher's exit code, once `run` has returned.
    """

    def __init__(self, manager: Any, args: Any) -> None:
        self._manager = manager
        self._attempts = MsAttempts.of(args, bool(manager.is_master))
        self._restarts = Restarts(always=True)
        self._workers: list[Worker] = []
        self._mark, self._left = "", False
        self._told: signal.Signals | None = None
        self._ending, self._said = "", 0
        self._job_log, self._restarted = JobLog(), 0
        self.code = 1

    def run(self) -> None:
        """Run the complete job; never raises for a fault of its workers."""
        reset = ResetWatch(stop_this_launcher)
        with self._signals():
            try:
                self.code = self._run_attempts()
            finally:
                reset.close()
                self._end()
        if self._told is not None and self.code != 0:
            self.code = exitcodes.of_ending(self._ending) or self._said or 128 + self._told

    # -- attempts ---------------------------------------------------------------------------------

    def _run_attempts(self) -> int:
        while True:
            self._start()
            if self._good():
                return 0
            if self._told is not None:
                self._stop()
                return 128 + self._told
            self._hold()
            codes = self._codes()  # lost after the clean-up
            refused, self._left = exitcodes.REFUSED in codes, 0 in codes
            progressed = self._attempts.progressed(codes)
            self._clear()
            how = frozenset(code for code in codes if code)
            self._restarts.left, self._restarts.repeats = self._attempts.leaves(), self._attempts.repeats()
            self._restarts.completed = self._attempts.completed()
            self._restarts.ended(self._attempts.number, self._attempts.joined(), progressed, refused, how)
            self._restarted += 1
            again = self._job_log.restarting(self._restarted, DEFAULT_MAX_RESTARTS)
            stops = self._restarts.should_give_up or self._told is not None
            self._say_event("stopping" if stops else again, self._restarts.behind)
            if self._restarts.should_give_up:
                sys.stderr.write(f"lastgasp: {self._restarts.verdict}\n")
                return self._restarts.exit_code
            ranks = [worker.rank for worker in self._workers]
            if not self._attempts.wait_quiet(ranks, lambda: self._told is not None):
                sys.stderr.write("lastgasp: stopped: the launcher of the first node has ended; its output says why\n")
                return 1
            if self._told is not None:
                return 128 + self._told

    def _say_event(self, then: str, behind: str = "") -> None:
        self._job_log.recovery(self._attempts.number, self._attempts.event(), then, behind)

    def _start(self) -> None:
        recover_orphans(MARKS_LIMIT)
        self._mark = orphans.new_mark()
        os.environ.update(self._attempts.begin() | {orphans.MARK: self._mark})
        self._require_scheduler()
        self._manager.start_all_workers()
        self._workers = workers_of(self._manager.monitor_rank_status([-1]))

    def _require_scheduler(self) -> None:
        """Restart msrun's scheduler, through which the ranks meet, if it must be replaced.

        On one node a restart gets a new one: the old one calls its cluster complete as soon as the first rank is back,
        and so may report a dead rank's address to it: the first AllReduce then fails after 30 s. On several nodes
        their workers may already have joined the old one; it stays, unless a rank has signed off: then it ends as
        soon as the others have (MindSpore's own receiving thread crashes now and then while it does so,
        libmindspore_cluster of 2.9.0 on a loaded machine).
        """
        process = self._manager.msn_process
        if process is None or not self._attempts.number:
            return
        if process.poll() is not None:
            if process.returncode:
                log.warning("msrun's scheduler has ended with %s: starting another one", process.returncode)
        elif self._left or not self._attempts.several:
            process.kill()
            process.wait()
        if process.poll() is not None:
            log_file = Path(self._manager.log_dir, "scheduler.log")
            with contextlib.suppress(OSError):
                log_file.rename(log_file.with_name(f"scheduler.attempt{self._attempts.number - 1}.log"))
            self._manager.start_scheduler()

    def _good(self) -> bool:
        """Wait until all have succeeded, or one has failed or hangs, or this launcher is asked to stop."""
        while self._told is None:
            codes = [worker.code() for worker in self._workers]
            if any(codes) or self._attempts.abandoned(LEAVE):
                return False
            if all(code == 0 for code in codes):
                return True
            time.sleep(LOOK)
        return False

    def _hold(self) -> None:
        """Let the survivors save and exit; msrun itself would kill them at once."""
        known: set[int] = set()
        verdict = self._restarts.verdict_of_framework = framework_verdict.take(self._mark)
        limit = self._attempts.hold_limit() if verdict is None else LEAVE  # then there is nothing worth saving
        deadline = _clock.monotonic() + limit
        while True:
            for worker in self._workers:
                code = worker.code()
                if code and worker.rank not in known:
                    known.add(worker.rank)
                    log.warning("rank %d %s", worker.rank, describe_exit(code))
                    self._attempts.report_exit(worker.rank, describe_exit(code))
            over = self._attempts.over_for()
            if not self._running() or not self._attempts.in_use() or (over is not None and over > LEAVE):
                return
            if _clock.monotonic() > deadline:
                level = logging.ERROR if verdict is None else logging.INFO
                log.log(level, "the survivors did not finish within %g s: ending them", limit)
                return
            time.sleep(LOOK)

    def _stop(self) -> None:
        """This launcher was asked to stop: let the workers save and exit."""
        for worker in self._running():
            worker.tell(signal.SIGTERM)
        deadline = _clock.monotonic() + max(STOP, self._attempts.hold_limit())
        while self._running() and _clock.monotonic() < deadline:
            time.sleep(LOOK)
        self._said = max((code for worker in self._workers if (code := worker.code()) in _SAID), default=0)
        self._clear()

    def _codes(self) -> set[int | None]:
        return {worker.code() for worker in self._workers}

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code() is None]

    # -- cleaning up ------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Clean up the attempt; keep its logs under its number."""
        logs = [worker.log for worker in self._workers if worker.log is not None]
        self._show(logs)
        self._manager.kill_workers([-1])
        kept = keep_logs(self._workers, self._attempts.number)
        if kept:
            log.warning("logs of attempt %d: %s", self._attempts.number, " ".join(map(str, kept)))
        self._reap()

    def _show(self, logs: list[Path]) -> None:
        readers = [process.pid for process in self._manager.tail_cgn_processes if process is not None]
        wait_shown(readers, logs, SHOW)

    def _reap(self) -> None:
        command = [self._manager.cmd, *self._manager.cmd_args]
        deadline = _clock.monotonic() + DIE
        while self._running() and _clock.monotonic() < deadline:
            time.sleep(LOOK)
        for worker in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, os.WNOHANG)
        if self._mark:
            orphans.reap(self._mark, command)
        self._mark = ""

    def _end(self) -> None:
        """Clean up after the last attempt, successful or not, also when an exception ends it."""
        if self.code == 0:
            self._show([worker.log for worker in self._workers if worker.log is not None])
            self._manager.kill_tail_log_processes()
            self._mark = ""  # processes left by a successful job are intentional
        else:
            self._manager.kill_workers([-1])
            self._reap()
        self._end_scheduler()
        self._say_event("training was complete" if self.code == 0 else "stopping")
        self._job_log.ended(self._attempts.summary("done" if self.code == 0 else "stopped"))
        self._ending = self._attempts.close()
        recover_orphans(MARKS_LIMIT)

    def _end_scheduler(self) -> None:
        process = self._manager.msn_process
        if process is None:
            return
        try:
            process.wait(SCHEDULER if self.code == 0 else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            if before[number] is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._tell)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = self._told or signal.Signals(number)
