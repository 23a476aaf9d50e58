"""Which controller the ranks of a job under msrun get, and what that reports about them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lastgasp import _clock, exitcodes
from lastgasp.errors import ConfigError, LastgaspError
from lastgasp.gasp import messages as m
from lastgasp.gasp.addresses import loopback
from lastgasp.gasp.keeper import BufferKeeper
from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.repeats import Repeats
from lastgasp.gasp.secret import FILE, TOKEN, token_from_environment
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.launch.attempts import HOLD_WITHOUT_CONTROLLER
from lastgasp.launch.restarts import Completed

LED = 5.0
"""Seconds within which the controller of another node must be reachable."""
PAUSE = 0.2
"""Seconds between two queries."""


@dataclass(frozen=True)
class Plan:
    """Where the controller is.

    Attributes:
        job: the same on all nodes and in all attempts.
        host, port: where it listens; port 0 takes any.
        token: the job's secret.
        here: this launcher starts it; several: the job has ranks on other nodes.
    """

    job: str
    host: str
    port: int
    token: str
    here: bool
    several: bool = False


def plan(worker_num: int, local_worker_num: int, master: str, is_master: bool) -> Plan:
    """Decide where the controller runs. Pure but for the environment and a fresh secret.

    Args:
        worker_num, local_worker_num: msrun's.
        master: `address:port` of msrun's scheduler; names the job where it spans nodes.
        is_master: the scheduler runs on this node.

    Raises:
        ConfigError: several nodes, and no address or no secret that all of them know.
    """
    env = os.environ
    address = env.get("LASTGASP_CONTROLLER", "")
    if local_worker_num >= worker_num:
        job = env.get("LASTGASP_JOB") or env.get("MINDX_TASK_ID") or uuid.uuid4().hex[:12]
        return Plan(job=job, host=loopback(), port=0, token=new_token(), here=True)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        allowed = f"host:port of node 0 on the training network, because this node has {local_worker_num} of "
        remedy = "Set it, and LASTGASP_TOKEN, to the same on every node; the port must be free on node 0."
        raise ConfigError("LASTGASP_CONTROLLER", address or None, f"{allowed}{worker_num} workers", remedy)
    token = token_from_environment(env)
    if not token:
        remedy = f"Set it to the same secret on every node (`openssl rand -hex 32`), or {FILE} to a file with it."
        raise ConfigError(TOKEN, None, "a secret that all nodes of the job share", remedy)
    job = env.get("LASTGASP_JOB") or env.get("MINDX_TASK_ID") or master
    return Plan(job=job, host=host, port=int(port), token=token, here=is_master, several=True)


def quiet(seen: m.Ranks, attempt: int, failed: Collection[int]) -> bool:
    """Whether a restart is safe because no recovery of this attempt is under way. Pure.

    Args:
        seen: the controller's answer.
        failed: ranks that have ended; if none of them has ever joined, nobody is saving for them.
    """
    if seen.attempt != attempt or seen.state in ("waiting", "over", "ended"):
        return True
    return all(row.state == "awaited" for row in seen.rows if row.rank in failed)


def _look(address: str, token: str) -> m.Ranks | None:
    """The ranks of the job; None if the controller does not answer."""
    try:
        with OperatorLink(address, token, LED) as link:
            return link.ranks()
    except LastgaspError:
        return None


class MsAttempts:
    """Starts the controller with the first attempt and keeps it for all of them.

    Args:
        where: what `plan` decided.

    Attributes:
        number: of the attempt, from 0; -1 before the first.
        several: the job has ranks on other nodes.

    Raises (constructor):
        ConfigError: the controller cannot listen there.
    """

    def __init__(self, where: Plan) -> None:
        self._plan, self.number, self.several = where, -1, where.several
        self._controller: ControllerThread | None = None
        self._keeper = None if where.here else BufferKeeper(f"{where.host}:{where.port}", where.token)
        if where.here:
            try:
                self._controller = ControllerThread(where.token, where.host, where.port)
            except OSError as error:
                remedy = f"{error.strerror or error}. Set it to a free port of this node's address."
                value = f"{where.host}:{where.port}"
                raise ConfigError("LASTGASP_CONTROLLER", value, "an address of this node", remedy) from error

    @classmethod
    def of(cls, args: Any, is_master: bool) -> MsAttempts:
        """For msrun's parsed command line."""
        master = f"{args.master_addr}:{args.master_port}"
        if args.local_worker_num < args.worker_num and args.node_rank < 0:
            remedy = "Give each node its own, from 0: msrun gives out ranks only then."
            raise ConfigError("--node_rank", args.node_rank, "0 or more in a job of several nodes", remedy)
        return cls(plan(args.worker_num, args.local_worker_num, master, is_master))

    def begin(self) -> dict[str, str]:
        """The next attempt begins.

        Returns:
            Variables for its workers' environment.
        """
        self.number += 1
        if self._controller is not None and not self.several:  # launchers of other nodes count on their own
            self._controller.expect(self.number)
        end = self._controller.endpoint if self._controller is not None else None
        return {
            "LASTGASP_JOB": self._plan.job,
            "LASTGASP_ATTEMPT": str(self.number),
            "LASTGASP_CONTROLLER": end.address if end else f"{self._plan.host}:{self._plan.port}",
            "LASTGASP_TOKEN": self._plan.token,
            "LASTGASP_LAUNCHER": "run",
        }

    def in_use(self) -> bool:
        """A rank of this attempt has joined; assumed if the controller is on another node."""
        return self._controller is None or self._controller.in_use(self.number)

    def joined(self) -> bool:
        """The same, also of ranks that lastgasp does not protect (`lastgasp.unprotected`)."""
        return self._controller is None or self._controller.joined(self.number)

    def report_exit(self, rank: int, how: str) -> None:
        """A worker of this node ended."""
        if self._controller is not None and self._controller.in_use(self.number):
            self._controller.report_exit(rank, how)

    def over_for(self) -> float | None:
        """Seconds since the recovery ended, as far as this node knows."""
        if self._controller is not None:
            return self._controller.over_for(self.number)
        return None if self._keeper is None else self._keeper.over_for(self.number)

    def abandoned(self, seconds: float) -> bool:
        """The recovery ended longer ago than that: ranks of this node that still run are for this launcher to end."""
        over = None if self._controller is not None else self.over_for()
        return over is not None and over > seconds

    def progressed(self, codes: Collection[int | None]) -> bool:
        """A new step was completed, as far as this node knows.

        A node without the controller leaves that judgement to the first one, unless one of its own ranks has refused to
        start and none of them has saved a step.

        Args:
            codes: how the ranks of this node have ended; None while one runs.
        """
        if self._controller is None:
            return exitcodes.REFUSED not in codes or exitcodes.SAVED in codes
        return self._controller.progressed(self.number)

    def completed(self) -> Completed:
        """What all ranks of the attempt have completed; the launcher with the controller judges that."""
        known = self._controller is not None and self._controller.completed(self.number)
        return "training" if known else ""

    def repeats(self) -> Repeats:
        """How often in a row one exception has ended the training; the launcher with the controller judges that."""
        return Repeats() if self._controller is None else self._controller.repeats(self.number)

    def leaves(self) -> str:
        """How the recovery ended where no restart shall follow it; the launcher with the controller judges that."""
        led, number = self._controller, self.number
        return led.last_ending(number) if led is not None and led.leaves(number) else ""

    def event(self) -> str:
        """The recovery of this attempt in one line; empty if there was none, or another node's launcher reports it."""
        return "" if self._controller is None else self._controller.event(self.number)

    def summary(self, ending: str) -> str:
        """The job's last line; empty where no rank uses lastgasp, or another node's launcher reports it."""
        return "" if self._controller is None else self._controller.summary(ending)

    def hold_limit(self) -> float:
        """Seconds that survivors may take."""
        return HOLD_WITHOUT_CONTROLLER if self._controller is None else self._controller.hold_limit()

    def wait_quiet(self, failed: Collection[int], told: Callable[[], bool]) -> bool:
        """Before a restart: wait while a survivor on another node saves; on a single node nobody is left.

        Otherwise the first rank of the next attempt to join would take the controller away from the savers of this one.

        Args:
            failed: the ranks of this node; told: returns whether to stop waiting.

        Returns:
            Whether to restart at all: False if the launcher of the first node has ended.
        """
        if not self._plan.several:
            return True
        end = self._controller.endpoint.address if self._controller is not None else ""
        address, now = end or f"{self._plan.host}:{self._plan.port}", _clock.monotonic()
        deadline, lost_by = now + HOLD_WITHOUT_CONTROLLER, now + LED
        while (now := _clock.monotonic()) < deadline and not told():
            seen = _look(address, self._plan.token)
            if seen is not None and quiet(seen, self.number, failed):
                return True
            if seen is None and now > lost_by:
                return False
            lost_by = lost_by if seen is None else now + LED
            time.sleep(PAUSE)
        return True

    def close(self) -> str:
        """Stop the controller; idempotent.

        Returns:
            How the last recovery ended, empty when there was none.
        """
        if self._keeper is not None:
            self._keeper.close()
        if self._controller is None:
            return ""
        ending = self._controller.last_ending(self.number)
        self._controller.stop()
        return ending
