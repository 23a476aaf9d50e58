"""One attempt as torchrun's agent sees it: which controller its workers get, and what that reports about them."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from lastgasp import _clock
from lastgasp.errors import ConfigError, LastgaspError
from lastgasp.gasp.addresses import address_towards, loopback
from lastgasp.gasp.keeper import BufferKeeper
from lastgasp.gasp.repeats import Repeats
from lastgasp.gasp.secret import REMEDY, Secret
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.gasp.signin import Desk
from lastgasp.launch.lastword import LastWord, last_word
from lastgasp.launch.notice import Notice
from lastgasp.launch.restarts import Completed
from lastgasp.launch.stores import own_address
from lastgasp.narration import Tally
from lastgasp.topology import UNNAMED

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup

log = logging.getLogger("lastgasp.launch")

LEAVE = 15.0
"""Seconds for released workers to exit on their own, including their own clean-up."""
HOLD_WITHOUT_CONTROLLER = 660.0
"""Seconds that an agent waits for its survivors if neither they nor a controller have said how long they may take."""
NOTICE_TIMEOUT = 60.0
"""Seconds for the first node to publish where its controller listens, if it is known to have one."""
BRIEFLY = 5.0
"""The same if that is not known, and nothing says when to stop waiting."""


@dataclass
class LaunchAttempt:
    """One attempt of the job on this node. Everything is answered from within this process.

    Attributes:
        number: how often workers have been started before.
        controller: on the first node only; keeper: on all others, where there is a controller.
        desk: where the ranks of this node sign in.
    """

    number: int
    controller: ControllerThread | None = None
    keeper: BufferKeeper | None = None
    desk: Desk = field(default_factory=Desk)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def led(self) -> bool:
        """The ranks have a controller, so the first node's agent is lastgasp's."""
        return bool(self.environment.get("LASTGASP_CONTROLLER"))

    def in_use(self) -> bool:
        """At least one rank of this attempt uses lastgasp: one of this node, or any that the controller knows."""
        return bool(self.desk.entries) or (self.controller is not None and self.controller.in_use(self.number))

    def joined(self) -> bool:
        """At least one rank has joined, even one that lastgasp does not protect (`lastgasp.unprotected`)."""
        return self.in_use() or (self.controller is not None and self.controller.joined(self.number))

    def report_exit(self, rank: int, how: str, pid: int = 0) -> None:
        """A worker of this node ended."""
        if self.controller is not None:
            self.controller.report_exit(rank, how, pid)

    def report_start(self, how: str) -> None:
        """The workers of this node have been started: warm, or cold and why. Called for restarts only."""
        if self.number == 0:
            return
        log.debug("restarted %s", how)
        if self.controller is not None:
            self.controller.report_start(self.number, how)

    def over_for(self) -> float | None:
        """Seconds since the recovery ended, as far as this node knows."""
        if self.controller is not None:
            return self.controller.over_for(self.number)
        return None if self.keeper is None else self.keeper.over_for(self.number)

    def ended(self) -> bool:
        """Whether the recovery is over, and nobody goes on in place, as far as this node knows."""
        if self.controller is not None:
            return self.controller.last_ending(self.number) not in ("", "in_place")
        return self.over_for() is not None

    def progressed(self, refused: bool = False) -> bool:
        """A new step was completed.

        An agent without the controller leaves that judgement to the first node, unless a rank of its own has `refused`
        to start and none of them has saved a step.
        """
        if self.controller is not None:
            return self.controller.progressed(self.number)
        return not refused or any(entry.ending == "saved" for entry in self.desk.entries.values())

    def completed(self) -> Completed:
        """What all ranks of the attempt have completed, as far as this node knows; without a controller, its own."""
        entries = self.desk.entries.values()
        known = left = bool(entries) and all(entry.left for entry in entries)
        if self.controller is not None:
            known = self.controller.completed(self.number)
        elif self.keeper is not None:
            known = self.keeper.completed == self.number
        if not known:
            return ""
        return "script" if left and all(entry.ended for entry in entries) else "training"

    @property
    def out_of_reach(self) -> set[int]:
        """Ranks of this host that have not heard for long that the recovery is over; the controller cannot end them.

        They hang, or were cut off.
        """
        over = None if self.controller is not None else self.over_for()
        entries = self.desk.entries if over is not None and over > LEAVE else {}
        return {rank for rank, entry in entries.items() if not entry.left and not entry.ending}

    def have_left(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks of this host have completed their training."""
        entries = self.desk.entries
        return all(rank in entries and entries[rank].left for rank in ranks)

    def refused_elsewhere(self) -> bool:
        """A rank of another host has refused to start: its launcher ends, and the job cannot go on."""
        if self.controller is not None:
            return self.controller.refused(self.number)
        return self.keeper is not None and self.keeper.refused == self.number

    def repeats(self) -> Repeats:
        """How often in a row one exception has ended the training; the launcher with the controller judges that."""
        return Repeats() if self.controller is None else self.controller.repeats(self.number)

    def leaves(self) -> str:
        """How the recovery ended (`events.Ending`), where no restart shall follow it; else empty."""
        asked = self.controller is not None and self.controller.leaves(self.number)
        return self.last_word().ending if asked else ""

    def event(self) -> str:
        """The recovery of this attempt in one line; empty if there was none, or another node's launcher reports it."""
        return "" if self.controller is None else self.controller.event(self.number)

    def hold_limit(self) -> float:
        """Seconds that survivors may take."""
        if self.controller is not None and (limit := self.controller.hold_limit()):
            return limit
        return self.desk.hold or HOLD_WITHOUT_CONTROLLER

    def end_limit(self) -> float:
        """Seconds that ranks which are told to end may take; none once the first node has said that nobody saves."""
        return 0.0 if self.controller is None and self.over_for() is not None else self.hold_limit()

    def living_launchers(self, size: int) -> int | None:
        """How many of the job's launchers are alive; None if this one does not know, or while training continues."""
        return None if self.controller is None else self.controller.living_launchers(self.number, size)

    def last_word(self) -> LastWord:
        """What became of this attempt's last step, according to the controller, this node's ranks or the records."""
        led = self.controller.last_ending(self.number) if self.controller is not None else ""
        job, since = self.environment.get("LASTGASP_JOB", ""), int(self.environment.get("LASTGASP_SINCE", 0))
        return last_word(self.desk.entries, job, self.number, led, since)


class LaunchAttempts:
    """Starts the controller with the first attempt and keeps it for all of them."""

    def __init__(self) -> None:
        self._controller: ControllerThread | None = None
        self._for_all, self._tally = False, Tally()
        """Whether the other hosts can reach the controller; what it counts goes on with the next one of this host."""
        self._repeats = Repeats()
        self._started, self._job, self._since_ns = 0, "", _clock.wall_ns()
        self._keeper: BufferKeeper | None = None
        self._notice: Notice | None = None
        self._last: LaunchAttempt | None = None
        self.last_word = LastWord()
        self._noticed = False
        self._given = dict(os.environ)
        """As the user has set it; later attempts see what this launcher has set for its ranks."""
        self._exported: dict[str, str] = {}

    def offer(self, store: Any, rank: int, size: int, run_id: str, fresh_store: bool) -> None:
        """Agree with the other agents; call it after the rendezvous, before torch assigns its ranks.

        The other agents learn their ranks from the first one, which reads from all of them first. So what they write
        before that has arrived when it reads, and what it writes before that has arrived when they read.

        Args:
            fresh_store: the rendezvous gives each attempt a store of its own (c10d does, static does not).

        Raises:
            ConfigError: under `lastgasp run`: LASTGASP_BIND, the secret or the TLS files.
        """
        if size > 1 and rank > 0:
            store.set(f"{_STARTED}/{rank}", f"{self._started} {self._job} {self._since_ns}")
        elif size > 1:
            number = self._agreed(store, size)
            notice, secret = self._first(store, size, run_id, number)
            store.set(_key(number, fresh_store), notice.sealed(secret).decode())
            self._notice = notice

    def _agreed(self, store: Any, size: int) -> int:
        """The number of this attempt: used by no launcher before, even if this one has just replaced another."""
        if not _ordered():
            return self._started
        store.wait([f"torchelastic/role_info/{other}" for other in range(1, size)])
        keys = [f"{_STARTED}/{other}" for other in range(1, size)]
        told = [match for key in keys if store.check([key]) and (match := _TOLD.fullmatch(bytes(store.get(key))))]
        self._job = self._job or next((match["job"].decode() for match in told if match["job"]), "")
        known = [(self._started, self._since_ns), *((int(one["started"]), int(one["since"])) for one in told)]
        # By a clock that is behind, what a host with another one has saved in an earlier job would be this job's.
        self._since_ns = max([since for started, since in known if started] or [since for _, since in known])
        return max(known)[0]

    def _name(self, run_id: str) -> str:
        """The job's name for all its attempts, by which what it has saved is told from what was there before."""
        self._job = run_id if run_id not in ("", UNNAMED) else self._job or str(uuid.uuid4())
        return self._job

    def _first(self, store: Any, size: int, run_id: str, number: int) -> tuple[Notice, Secret]:
        """What the first agent announces. Starts the controller, unless strangers could pass for ranks.

        Only `lastgasp run` is refused: any other job can run without a controller.
        """
        secret, why, job = Secret(), "", self._name(run_id)
        if size > 1 and not self._for_all:  # the job has grown: it listens on this host alone, for a token made here
            self._stop_controller()
        try:
            if size > 1:
                secret = Secret.from_environment(self._given)
                why = f"this job spans several nodes and they share no secret. {REMEDY}" if secret.missing else ""
            if not why and self._controller is None:
                self._controller, why = _start(
                    store, size, secret.token or new_token(), self._tally, self._repeats
                )
                self._for_all = size > 1
        except LastgaspError as error:
            if ours() or size == 1:
                raise
            why = str(error)
        if self._controller is None:
            return Notice("", "", job, number, self._since_ns, why), secret
        self._controller.expect(number)
        end = self._controller.endpoint
        return Notice(end.address, end.token, job, number, self._since_ns), secret

    def begin(self, group: WorkerGroup, run_id: str, fresh_store: bool = False) -> LaunchAttempt:
        """Start the next attempt; its workers get what they need to reach the controller.

        Args:
            fresh_store: as in `offer`, which was called before.

        Raises:
            ConfigError: as `offer`.
        """
        self.end_attempt()
        size = group.group_world_size or 1
        if group.group_rank != 0:
            notice = self._read(group.store, run_id, fresh_store)
        elif size == 1 or self._notice is None:
            notice, _ = self._first(None, 1, run_id, self._started)
        else:
            notice = self._notice
        if group.group_rank != 0:
            self._stop_controller()  # another host has become the first one
            self._keep_buffers(notice)
        self._started = notice.attempt + 1
        controller = self._controller if group.group_rank == 0 else None
        current = self._last = LaunchAttempt(number=notice.attempt, controller=controller)
        current.keeper = self._keeper if group.group_rank != 0 else None
        current.environment = current.desk.environment | notice.environment
        return current

    def _stop_controller(self) -> None:
        if self._controller is not None:
            self._repeats = self._controller.repeats(self._started - 1)
            self._controller.stop()
            self._controller = None

    def export(self, variables: Mapping[str, str]) -> None:
        """Set what this process's children are to inherit, until `close`."""
        self._exported |= variables
        os.environ.update(variables)

    def _take_back(self) -> None:
        """A notebook or a driver may train itself after its job, whose controller is gone then."""
        for name in [name for name, value in self._exported.items() if os.environ.get(name) == value]:
            if name in self._given:
                os.environ[name] = self._given[name]
            else:
                del os.environ[name]
        self._exported.clear()

    def _keep_buffers(self, notice: Notice) -> None:
        """Report the buffers that this host's ranks leave behind to the controller, which is on another host."""
        if self._keeper is not None and self._keeper.address != notice.controller:
            self._keeper.close()
            self._keeper = None
        if self._keeper is None and notice.controller:
            self._keeper = BufferKeeper(notice.controller, notice.token)

    def _read(self, store: Any, run_id: str, fresh_store: bool) -> Notice:
        """The first agent's notice; one that says that there is no controller if none arrives."""
        key = _key(self._started, fresh_store)
        why = "the launcher of the first node has no lastgasp; install it on every node"
        try:
            if not (fresh_store and _ordered()) and (self._noticed or self._started == 0):
                store.wait([key], timedelta(seconds=NOTICE_TIMEOUT if self._noticed or ours() else BRIEFLY))
            if store.check([key]):
                self._noticed = True
                notice = msgspec.json.decode(store.get(key), type=Notice)
                self._job, self._since_ns = notice.job, notice.since_ns
                return notice.known_by(Secret.from_environment(self._given))
        except LastgaspError as error:
            if ours():
                raise
            why = str(error)
        except (RuntimeError, msgspec.DecodeError) as error:  # the store is gone, or no valid answer came
            why = str(error).partition("\n")[0]
        if ours():
            log.warning("no controller for this job: %s", why)
        return Notice("", "", self._job or run_id, self._started, why=why)

    def end_attempt(self) -> None:
        """The workers of the attempt have ended: keep what became of their last step. Idempotent.

        Where they have ended before any of them has joined, that is what the attempt before has left.
        """
        if self._last is not None:
            word = self._last.last_word()
            if word.ending or self._last.joined():
                self.last_word = word
            self._last.desk.close()
            self._last = None

    @property
    def refused_elsewhere(self) -> bool:
        """As of the newest attempt (`LaunchAttempt.refused_elsewhere`), also once it has ended."""
        return self._keeper is not None and self._keeper.refused == self._started - 1

    def summary(self, ending: str) -> str:
        """The job's last line; empty where no rank uses lastgasp, or another node's launcher reports it."""
        return "" if self._controller is None else self._controller.summary(ending)

    def close(self) -> str:
        """Stop the controller; idempotent.

        Returns:
            How the last recovery ended, empty when there was none.
        """
        if self._keeper is not None:
            self._keeper.close()
        self.end_attempt()
        self._stop_controller()
        self._take_back()
        return self.last_word.ending


_STARTED = "lastgasp/started"
_TOLD = re.compile(rb"(?P<started>[0-9]{1,6}) (?:(?P<job>[0-9a-f-]{36})|.*) (?P<since>[0-9]{1,19})", re.DOTALL)
"""What the others say: attempts that they have started, the job's name if lastgasp has given it, and since when."""


def ours() -> bool:
    """This launcher is `lastgasp run`, so missing requirements are errors."""
    return os.environ.get("LASTGASP_LAUNCHER") == "run"


def _ordered() -> bool:
    """Whether the other agents wait for the first one's assignment of ranks, and it for all of them."""
    return os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") != "1"


def _start(
    store: Any, size: int, token: str, tally: Tally, repeats: Repeats
) -> tuple[ControllerThread | None, str]:
    """The controller, which counts on in `tally`, from `repeats`; None, and why, where other nodes could not reach it.

    Raises:
        ConfigError: LASTGASP_BIND, or the TLS files.
    """
    host = os.environ.get("LASTGASP_BIND") or (loopback() if size == 1 else _reachable(store))
    if not host:
        return None, (
            f"this job spans {size} nodes, and the first one could not find the address by which the others reach it: "
            "set LASTGASP_BIND there to its address on the training network"
        )
    try:
        return ControllerThread(token, host, tally=tally, repeats=repeats), ""
    except OSError as error:
        if not os.environ.get("LASTGASP_BIND"):
            return None, f"its controller cannot listen at {host} ({error.strerror or error})"
        remedy = f"{error.strerror or error}. Leave it out, or set it on each node to its own address."
        raise ConfigError("LASTGASP_BIND", host, "an address of this node", remedy) from error


def _key(number: int, fresh_store: bool) -> str:
    return "lastgasp/notice" if fresh_store else f"lastgasp/notice/{number}"


def _reachable(store: Any) -> str:
    """This node's address for the others; empty if it cannot be determined."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    port = getattr(inner, "port", None)
    found = own_address(port) if isinstance(port, int) else ""
    return found or address_towards(str(getattr(inner, "host", "") or ""))
