"""Run the controller in a thread of the launcher, or in a detached process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from lastgasp import _clock, logs, narration, user_signals
from lastgasp.errors import ControlError, DeadlineExceeded
from lastgasp.steps.recover import recover_orphans

from . import messages as m
from .again import Again, Offer
from .attempt import Attempt
from .controller import Controller
from .ladder import Ladder
from .repeats import Repeats
from .resetfile import ResetWatch
from .starter import Starter

log = logging.getLogger("lastgasp.controller")

T = TypeVar("T")
log = logging.getLogger("lastgasp.controller")
WORDS_TIMEOUT = 10.0
"""Seconds that a launcher waits for a log line from the controller."""
START_TIMEOUT = 30.0
"""Seconds the controller gets to listen."""
UNUSED_TIMEOUT = 300.0
"""Seconds that a detached controller waits for the first rank, while the process that started it is alive."""
LINGER = 2.0
"""Seconds that a detached controller stays after the last rank left, or without ranks once its starter has ended.

It shares the starter's standard error, so a reader of that (`job 2>&1 | tee log`) waits for it.
"""


@dataclass(frozen=True)
class Endpoint:
    """Where the controller listens, and the secret that it requires."""

    host: str
    port: int
    token: str

    @property
    def address(self) -> str:
        """host:port, as the environment carries it."""
        return f"{self.host}:{self.port}"


def new_token() -> str:
    """A fresh secret for one job; 256 bits."""
    return secrets.token_hex(32)


class ControllerThread:
    """The controller inside the launcher: one daemon thread with its own event loop.

    Args:
        token, host, port: as the `Controller`'s; tally, repeats: where it counts on.
    """

    def __init__(
        self, token: str, host: str = "127.0.0.1", port: int = 0,
        *, tally: narration.Tally | None = None, repeats: Repeats | None = None,
    ) -> None:  # fmt: skip
        self._controller = Controller(token, host, port)
        self._controller.incidents.before = repeats or Repeats()
        if tally is not None:
            self._controller.incidents.tally = tally
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lastgasp-controller", daemon=True)
        self._thread.start()
        try:
            self.endpoint = Endpoint(host, self._run(self._controller.start()), token)
        except BaseException:
            self._end()
            raise

    def _run(self, coroutine: Coroutine[Any, Any, T], seconds: float = START_TIMEOUT) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def _call(self, function: Callable[[], T], seconds: float = START_TIMEOUT) -> T:
        async def run() -> T:
            return function()

        return self._run(run(), seconds)

    def expect(self, attempt: int) -> None:
        """From now on admit only ranks of this attempt, which the launcher numbers. Does not wait.

        Takes effect before any message of a rank started after this call.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._controller.expect, attempt)

    def report_exit(self, rank: int, how: str, pid: int = 0) -> None:
        """Report that the process of `rank` ended; does not wait, and does nothing once the controller is stopped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._controller.report_exit, rank, how, pid)

    def offers(self, attempt: int) -> None:
        """Report that `offer` will be called for this attempt; like `report_exit`, does not wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._controller.offers, attempt)

    def offer(self, offer: Offer) -> None:
        """Report what this launcher can do for a recovery in place; like `report_exit`, does not wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._controller.offer, offer)

    def end_job(self, code: int, why: str) -> None:
        """Tell the launchers of all other hosts that this one ends the job for good; like `report_exit`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._controller.keepers.job_over, m.JobOver(code=code, why=why))

    def report_start(self, attempt: int, how: str) -> None:
        """Report how the ranks of this attempt were started; like `report_exit`, does not wait."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._controller.incidents.started, attempt, how)

    # Asked by a launcher between two looks at its workers. They read the current state without waiting for the
    # controller's loop, which may be late, and never raise.

    def in_use(self, attempt: int) -> bool:
        """A rank of this attempt that lastgasp protects has joined, and none of a later attempt."""
        found = self._controller.attempt
        return found is not None and found.hello.attempt == attempt and not found.unprotected

    def joined(self, attempt: int) -> bool:
        """A rank of this attempt has joined, protected or not."""
        return self._attempt(attempt) is not None

    def over_for(self, attempt: int) -> float | None:
        """Seconds since the recovery of this attempt ended; None while it has not."""
        found = self._attempt(attempt)
        over = found.over_since if found is not None else None
        return None if over is None else _clock.monotonic() - over

    def progressed(self, attempt: int) -> bool:
        """This attempt completed at least one new step."""
        found = self._attempt(attempt)
        return found is not None and found.progressed

    def completed(self, attempt: int) -> bool:
        """All ranks of this attempt have completed their training."""
        found = self._attempt(attempt)
        return found is not None and not found.unprotected and found.was_ended()

    def refused(self, attempt: int) -> bool:
        """A rank of any host has refused to start in this attempt."""
        return attempt in self._controller.keepers.refused

    def repeats(self, attempt: int) -> Repeats:
        """How often in a row one exception has ended the training, up to this attempt."""
        found = self._attempt(attempt)
        return found.repeats if found is not None else self._controller.incidents.before

    def living_launchers(self, attempt: int, size: int) -> int | None:
        """How many of the job's `size` launchers are connected and have ranks in it, this one included.

        None while a rank of this attempt trains, or if not all launchers have connected yet.
        """
        found, keepers = self._attempt(attempt), self._controller.keepers
        trains = found is None or not all(one.left or one.gone for one in found.machine.members.values())
        if trains or keepers.most < size - 1:
            return None
        again = self.again(attempt)
        grows = again is not None and bool(again.members)  # only then is there somebody who waits to be taken in
        return 1 + (keepers.taking_part(attempt) if grows else keepers.connected)

    def may_enter_again(self, attempt: int) -> int | None:
        """The next incarnation of this attempt, if its ranks may be entered again in place; else None."""
        found = self._attempt(attempt)
        machine = found.machine if found is not None else None
        return machine.incarnation + 1 if isinstance(machine, Ladder) and machine.wanted else None

    def nobody_comes(self, attempt: int) -> bool:
        """Its ranks were to enter again in place, and so many have ended meanwhile that none will join."""
        found, ended = self._controller.attempt, self._controller.not_replaced
        if found is None or found.hello.attempt != attempt or not isinstance(found.machine, Ladder):
            return False  # another leader answers it
        again = found.machine.again
        return again is not None and again.in_vain(found.hello.world_size, ended)

    def awaits_offer(self, attempt: int) -> bool:
        """Its ranks may be entered again in place, and nobody has said what can be done for that."""
        found = self._attempt(attempt)
        machine = found.machine if found is not None else None
        return isinstance(machine, Ladder) and machine.wanted and machine.offer is None

    def no_process(self, attempt: int, others: int) -> str:
        """Why ranks of the other hosts, `others` in number, cannot get new processes; empty where they can."""
        return self._controller.keepers.no_process(attempt, others)

    def missing(self, attempt: int, others: int) -> int:
        """How many of the launchers of the other hosts, `others` in number, cannot be reached."""
        return self._controller.keepers.missing(attempt, others)

    def not_grown(self, attempt: int) -> str:
        """Why ranks that wait are not taken in before there is another incarnation; empty where they may be."""
        found = self._attempt(attempt)
        return found.machine.not_grown if found is not None and isinstance(found.machine, Ladder) else ""

    def leaves(self, attempt: int) -> bool:
        """The ranks of this attempt asked that the job ends after a save, with no restart."""
        found = self._attempt(attempt)
        return found is not None and isinstance(found.machine, Ladder) and found.machine.leaves

    def again(self, attempt: int) -> Again | None:
        """What was agreed last for a recovery of this attempt in place; None where nothing was, yet."""
        found = self._attempt(attempt)
        before = self._controller.incidents.previous
        if found is not None and found.again is None and found.hello.incarnation and before is not None:
            return before.again
        return found.again if found is not None else None

    def hold_limit(self) -> float:
        """Seconds that a recovery may take in all: finishing updates, and two saves in a row."""
        found = self._controller.attempt
        return 0.0 if found is None else found.hello.finish_timeout + 2 * found.hello.save_timeout

    def last_ending(self, attempt: int) -> str:
        """How the recovery of this attempt ended; empty if there was none."""
        found = self._attempt(attempt)
        ending = found.machine.outcome.ending if found is not None else "open"
        return "" if ending == "open" else ending

    def _attempt(self, number: int) -> Attempt | None:
        """Also the one before the current: under msrun another host may be the first to start the next one."""
        both = self._controller.attempt, self._controller.incidents.previous
        return next((found for found in both if found is not None and found.hello.attempt == number), None)

    def event(self, attempt: int) -> str:
        """The recovery of this attempt in one line, as far as it has come; empty when there was none. Never raises."""
        return self._words(lambda: self._event(attempt))

    def summary(self, ending: str) -> str:
        """The job's last line (narration.Tally.summary); empty where no rank has joined. Never raises."""
        return self._words(lambda: self._summary(ending))

    def _words(self, find: Callable[[], str]) -> str:
        try:
            return self._call(find, WORDS_TIMEOUT) if self._thread.is_alive() else ""
        except (TimeoutError, RuntimeError) as error:  # only the line is lost
            log.debug("the controller does not answer: %s", error)
            return ""

    def settle(self, seconds: float = START_TIMEOUT) -> bool:
        """Wait until what is known of incidents is on disk; False where that took longer than `seconds`."""
        self._call(self._controller.incidents.flush)
        return self._controller.records.settle(seconds)

    def stop(self) -> None:
        """Close everything, in bounded time; idempotent. Failures are only logged: the job itself has ended."""
        if not self._thread.is_alive():
            return
        try:
            self._run(self._controller.stop())
        except Exception as error:
            log.error("the controller could not be stopped properly: %s", str(error) or type(error).__name__)
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()

    def _event(self, attempt: int) -> str:
        found = self._attempt(attempt)
        if found is not None and found.unprotected:
            return narration.UNPROTECTED
        if found is None or found.incident is None:
            return ""
        found.refresh()
        return narration.event(found.incident)

    def _summary(self, ending: str) -> str:
        attempt, tally = self._controller.attempt, self._controller.incidents.tally
        if attempt is None:
            return ""
        return f"{ending} at step {tally.steps}" if attempt.unprotected else tally.summary(ending)


def start_detached(host: str = "127.0.0.1", token: str = "") -> Endpoint:
    """Start a controller process that outlives this one; it ends automatically after the last rank has left.

    Args:
        host: where it listens; token: the job's secret, a fresh one where it is empty.

    Raises:
        ControlError: it did not start; with its output.
        DeadlineExceeded: it did not answer in time.
    """
    token = token or new_token()
    process = subprocess.Popen(
        [sys.executable, "-m", "lastgasp.gasp.serve", host],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # signals to the job's process group must not reach it
        env=os.environ | {"LASTGASP_CONTROLLER_PROCESS": "1"},
        text=True,
    )
    try:
        out, _ = process.communicate(token + "\n", timeout=START_TIMEOUT)
    except subprocess.TimeoutExpired:
        kill_session(process)
        raise DeadlineExceeded("the controller to start", START_TIMEOUT, "Look at the machine's load.") from None
    if process.returncode != 0 or not out.strip().isdigit():
        raise ControlError(f"the controller did not start (exit code {process.returncode}): see its message above")
    return Endpoint(host, int(out), token)


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a process that fails to start, and its fork; reap it, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


async def _serve_uncoordinated(token: str, host: str, starter: Starter, announce: Callable[[int], None]) -> None:
    controller = Controller(token, host)
    announce(await controller.start())
    loop = asyncio.get_running_loop()
    reset = ResetWatch(lambda: loop.call_soon_threadsafe(controller.stop_ranks))
    empty_since = _clock.monotonic()
    while True:
        await asyncio.sleep(0.2)
        ever = controller.attempt is not None  # a rank may have joined and left between two looks
        if controller.connected:
            empty_since = _clock.monotonic()
        elif _clock.monotonic() - empty_since > (LINGER if ever or starter.gone() else UNUSED_TIMEOUT):
            break
    reset.close()
    await controller.stop()
    recover_orphans()  # the last step marks of ranks that were killed


def _main() -> None:
    """Read the token from stdin, fork into the background, print the port, serve."""
    token, host, starter = sys.stdin.readline().strip(), sys.argv[1], Starter(os.getppid())
    reading, writing = os.pipe()
    if os.fork():  # the parent reports the port and exits, so that nobody has to reap the controller
        os.close(writing)
        port = os.read(reading, 16).decode()
        sys.stdout.write(port)
        sys.stdout.flush()
        os._exit(0 if port else 1)
    os.close(reading)
    user_signals.outlive()
    logs.set_up()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)

    def announce(port: int) -> None:
        os.write(writing, str(port).encode())
        os.close(writing)

    asyncio.run(_serve_uncoordinated(token, host, starter, announce))


if __name__ == "__main__":
    _main()
