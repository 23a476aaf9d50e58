"""One round of workers as an agent sees it: which controller they get, and what it says about them."""

from __future__ import annotations

import hmac
import logging
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from lastgasp.errors import ConfigError
from lastgasp.gasp.keeper import BoxKeeper
from lastgasp.gasp.secret import FILE, REMEDY, TOKEN, UNCOORDINATED, Secret
from lastgasp.gasp.serve import ControllerThread, new_token

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup

log = logging.getLogger("lastgasp.launch")

HOLD_WITHOUT_CONTROLLER = 660.0
"""Seconds an agent waits for its survivors when the controller lives on another node."""
_IN_USE = "lastgasp/in_use"


_STRANGER = "-"
"""In place of a token that this node does not know: the controller refuses its ranks, and says why."""


class Notice(msgspec.Struct, frozen=True):
    """What the first agent tells the others through the rendezvous store, which anybody may read and write.

    Attributes:
        token: empty where the nodes share a secret: it does not travel.
        why: why there is no controller; empty where there is one.
        seal: by which an agent that knows the secret knows that this comes from one that does.
    """

    controller: str
    token: str
    job: str
    attempt: int
    why: str = ""
    seal: str = ""

    def sealed(self, secret: Secret) -> bytes:
        """For the store."""
        bare = msgspec.structs.replace(self, seal="", token="" if secret.token else self.token)
        return msgspec.json.encode(msgspec.structs.replace(bare, seal=secret.seal(msgspec.json.encode(bare))))

    def genuine(self, secret: Secret) -> bool:
        """It comes from who knows the secret; as far as there is one."""
        bare = msgspec.structs.replace(self, seal="")
        return hmac.compare_digest(self.seal, secret.seal(msgspec.json.encode(bare)))


@dataclass
class Round:
    """One attempt of the job on this node.

    Attributes:
        number: how often workers have been started before.
        controller: on the first node only.
        store: the rendezvous store where the job spans several nodes, else None.
    """

    number: int
    controller: ControllerThread | None = None
    store: Any | None = None
    environment: dict[str, str] = field(default_factory=dict)
    _told: bool = False

    def in_use(self) -> bool:
        """At least one rank of this attempt uses lastgasp."""
        key = f"{_IN_USE}/{self.number}"
        if self.controller is None:
            return self.store is not None and bool(self.store.check([key]))
        used = self.controller.in_use(self.number)
        if used and self.store is not None and not self._told:
            self._told = True
            self.store.set(key, "1")
        return used

    def report_exit(self, rank: int, how: str) -> None:
        """A worker of this node ended."""
        if self.controller is not None:
            self.controller.report_exit(rank, how)

    def over_for(self) -> float | None:
        """Seconds since the recovery ended, as far as this node knows."""
        return None if self.controller is None else self.controller.over_for(self.number)

    def progressed(self) -> bool:
        """A new step was completed; an agent without the controller leaves that judgement to the first."""
        return self.controller is None or self.controller.progressed(self.number)

    def event(self) -> str:
        """The recovery of this attempt in one line; empty where there was none, or another node's launcher tells it."""
        return "" if self.controller is None else self.controller.event(self.number)

    def hold_limit(self) -> float:
        """Seconds that survivors may take."""
        return HOLD_WITHOUT_CONTROLLER if self.controller is None else self.controller.hold_limit()


class Rounds:
    """Starts the controller with the first round and keeps it for all of them."""

    def __init__(self) -> None:
        self._controller: ControllerThread | None = None
        self._started = 0
        self._keeper: BoxKeeper | None = None
        self._given = dict(os.environ)
        """As the user has set it; later rounds find what this launcher has set for its ranks."""

    def begin(self, group: WorkerGroup, run_id: str, fresh_store: bool = False) -> Round:
        """The next round: find or start the controller and say how the workers reach it.

        Args:
            fresh_store: the rendezvous gives each round a store of its own (c10d does, static does not). Then
                the first agent's count is everybody's, also that of an agent that has just replaced another.
        """
        number, self._started = self._started, self._started + 1
        store = group.store if (group.group_world_size or 1) > 1 else None
        key = "lastgasp/notice" if fresh_store else f"lastgasp/notice/{number}"
        current = Round(number=number, store=store)
        secret = Secret.from_environment(self._given) if store is not None else Secret()
        if group.group_rank == 0:
            notice = self._first(group, run_id, number, secret)
            current.controller = self._controller
            if store is not None:
                store.set(key, notice.sealed(secret).decode())
        else:
            assert store is not None
            notice = _known(msgspec.json.decode(store.get(key), type=Notice), secret)
            current.number, self._started = notice.attempt, notice.attempt + 1
            self._keep_boxes(notice)
        current.environment = _environment(notice)
        return current

    def _keep_boxes(self, notice: Notice) -> None:
        """What the ranks of this host leave behind is told to the controller, which is on another one."""
        if self._keeper is not None and self._keeper.address != notice.controller:
            self._keeper.close()
            self._keeper = None
        if self._keeper is None and notice.controller:
            self._keeper = BoxKeeper(notice.controller, notice.token)

    def _first(self, group: WorkerGroup, run_id: str, number: int, secret: Secret) -> Notice:
        """What the first agent has to tell; starts the controller, unless strangers could not be told from ranks."""
        several = (group.group_world_size or 1) > 1
        if several and secret.missing:
            why = f"this job spans several nodes and they share no secret. {REMEDY}"
            return Notice("", "", run_id, number, why)
        self._controller = self._controller or _start(group, secret.token or new_token())
        if self._controller is not None:
            self._controller.expect(number)
        return _notice(self._controller, run_id, number)

    def summary(self, ending: str) -> str:
        """The job's last line; empty where no rank uses lastgasp, or another node's launcher tells it."""
        return "" if self._controller is None else self._controller.summary(ending)

    def close(self) -> str:
        """Stop the controller; idempotent.

        Returns:
            How the last recovery ended, empty when there was none.
        """
        if self._keeper is not None:
            self._keeper.close()
        if self._controller is None:
            return ""
        ending = self._controller.last_ending(self._started - 1)
        self._controller.stop()
        return ending


def _known(notice: Notice, secret: Secret) -> Notice:
    """The first agent's notice, as far as it can be believed; with the token that ranks of this node prove."""
    if notice.why:
        return msgspec.structs.replace(notice, controller="", token="")
    if not notice.genuine(secret):
        log.warning("the first node's launcher does not know this node's secret (%s, %s): are they the same there?",
                    FILE, TOKEN)  # fmt: skip
    return msgspec.structs.replace(notice, token=secret.token or notice.token or _STRANGER)


def _start(group: WorkerGroup, token: str) -> ControllerThread | None:
    host = os.environ.get("LASTGASP_BIND") or _loopback(group)
    if host is None:
        log.warning(
            "this job spans %d nodes and the controller listens on loopback only: set LASTGASP_BIND to this node's "
            "address on the training network, or ranks that use lastgasp will refuse to start",
            group.group_world_size,
        )
        return None
    try:
        return ControllerThread(token, host)
    except OSError as error:
        remedy = f"{error.strerror or error}. Set it to this node's address on the training network."
        raise ConfigError("LASTGASP_BIND", host, "an address of this node", remedy) from error


def _loopback(group: WorkerGroup) -> str | None:
    """127.0.0.1 where every node is this machine; None where other nodes must reach the controller."""
    if group.group_world_size == 1:
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(group.master_addr or "")
    except OSError:
        return None
    return "127.0.0.1" if address.startswith("127.") else None


def _notice(controller: ControllerThread | None, run_id: str, number: int) -> Notice:
    if controller is None:
        return Notice(controller="", token="", job=run_id, attempt=number)
    end = controller.endpoint
    return Notice(controller=end.address, token=end.token, job=run_id, attempt=number)


def _environment(notice: Notice) -> dict[str, str]:
    found = {"LASTGASP_JOB": notice.job, "LASTGASP_ATTEMPT": str(notice.attempt)}
    if notice.controller:
        found |= {"LASTGASP_CONTROLLER": notice.controller, "LASTGASP_TOKEN": notice.token}
    if notice.why:
        found[UNCOORDINATED] = notice.why
    return found | {"LASTGASP_LAUNCHER": os.environ.get("LASTGASP_LAUNCHER", "torchrun")}
