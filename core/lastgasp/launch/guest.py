"""A host comes back to a job that goes on without it, and its ranks are taken in with no restart.

The first node's launcher writes an invitation into the store of the rendezvous' current round. A launcher that comes
finds it there and does not join the rendezvous, which would make torchrun restart all ranks: it starts its own, says
when they wait for their order, and the others take them in. Where that fails it joins the rendezvous, as ever; but
where its host does not see the job's directory it ends, since a restart would be refused on all hosts.

Built on private names of torch 2.13 (`_state_holder`, `_get_store`); where they differ, nobody accepts an invitation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousError

from lastgasp import _clock, exitcodes
from lastgasp.gasp.joining import Code
from lastgasp.launch.bounded import BoundedStore, Unanswered
from lastgasp.launch.mounted import Look, Marker
from lastgasp.output import write_error

log = logging.getLogger("lastgasp.launch")

LOOK = 0.2
"""Seconds between two looks into the store."""
ENDED = "the job has ended"
"""Why a guest is refused once the ranks of the first host have completed all that they do."""
BEAT, SILENT, FIRST = 1.0, 60.0, 600.0
"""Seconds between two signs of life of a guest, without one after which it is given up, and from its word that it comes
until the first one: it starts its ranks meanwhile."""
TURN = 1800.0
"""Seconds that a launcher waits until another one is taken in."""
_INVITATION, _CLAIM, _READY, _PLAN, _REFUSED, _ALIVE, _GONE = (f"lastgasp/guest/{name}" for name in (
    "invitation", "claim", "ready", "plan", "refused", "alive", "gone"
))  # fmt: skip


class Invitation(msgspec.Struct, frozen=True):
    """What a launcher needs to take the place of one that is lost.

    Attributes:
        number: counts the invitations of a round.
        group_rank, hosts: of the place, and how many launchers the complete job has; each: ranks of a host.
        master, port: torch's, of the round.
        code: what the ranks that are there run.
        directory: of the job's checkpoints; marker: a file in it.
    """

    number: int
    group_rank: int
    hosts: int
    each: int
    master: str
    port: int
    code: Code
    directory: str
    marker: str


class Plan(msgspec.Struct, frozen=True):
    """How the ranks of a guest are taken in: `Again.members`, and the seat of each."""

    members: tuple[int, ...]
    filled: tuple[int, ...]


class Host:
    """The first node's side: invites a launcher to the place of a lost one, one at a time. Never raises.

    Args:
        group: the workers of this host; seats and ranks of the complete job are those that it began with.
        directory: of the job's checkpoints, once a rank of this host has said it; empty before.
    """

    def __init__(self, group: WorkerGroup, directory: Callable[[], str]) -> None:
        self._group, self._each, self._directory = group, len(group.workers), directory
        self._store = BoundedStore(group.store)
        self._hosts = group.group_world_size or 1
        world = group.workers[0].world_size if group.workers else 0
        self._able = self._hosts > 1 and world == self._each * self._hosts
        self._open: Invitation | None = None
        self._count, self._next, self._ready = 0, 0.0, False
        self._marker: Marker | None = None
        self._heard, self._heard_at = b"", 0.0

    def look(self, seats: list[int], code: Code) -> list[int]:
        """Invite where a whole host is missing. Returns the seats of a guest whose ranks are ready.

        Args:
            seats: those that are taken now; code: what their ranks run.
        """
        if not self._able or _clock.monotonic() < self._next:
            return self._seats if self._ready else []
        self._next = _clock.monotonic() + LOOK
        try:
            self._look(seats, code)
        except (DistError, RuntimeError) as error:
            log.debug("the store of the rendezvous cannot be asked: %s", error)
        return self._seats if self._ready else []

    @property
    def _seats(self) -> list[int]:
        return self._of(self._open.group_rank) if self._open is not None else []

    def _of(self, group_rank: int) -> list[int]:
        return list(range(group_rank * self._each, (group_rank + 1) * self._each))

    def _look(self, seats: list[int], code: Code) -> None:
        store, free = self._store, [n for n in range(1, self._hosts) if not {*self._of(n)} & {*seats}]
        ended = self._open is not None and (self._open.group_rank not in free or self._gone(self._open.number))
        if ended:
            self._open, self._ready = None, False
        if self._open is None and free and code and (marker := self._marked()) is not None:
            self._count += 1
            address, port = str(self._group.master_addr), int(self._group.master_port or 0)
            self._open = Invitation(self._count, free[0], self._hosts, self._each, address, port, code,
                                    str(marker.directory), marker.name)  # fmt: skip
            store.set(_INVITATION, msgspec.json.encode(self._open).decode())
            log.debug("the launcher of a host may come back without a restart")
        elif ended:
            self._close()
        if self._open is not None:
            self._ready = store.check(f"{_READY}/{self._open.number}")

    def _marked(self) -> Marker | None:
        """What shows a guest that it has the job's directory; None as long as it does not."""
        if self._marker is None and (directory := self._directory()):
            self._marker = Marker(Path(directory))
        return self._marker if self._marker is not None and self._marker.name else None

    def _gone(self, number: int) -> bool:
        """Whether the launcher that has accepted this invitation has ended, so that another one may come."""
        store, now = self._store, _clock.monotonic()
        if store.check(f"{_GONE}/{number}"):
            log.warning("%s", store.get(f"{_GONE}/{number}").decode())
            return True
        key = next((one for one in (_ALIVE, _CLAIM) if store.check(f"{one}/{number}")), "")
        heard, limit = store.get(f"{key}/{number}") if key else b"", SILENT if key == _ALIVE else FIRST
        if heard != self._heard:
            self._heard, self._heard_at = heard, now
        if not heard or now < self._heard_at + limit:
            return False
        why = f"its launcher has not been heard of for {limit:g} s"
        log.warning("a host that has come back stays missing: %s", why)
        store.set(f"{_REFUSED}/{number}", why)
        return True

    def plans(self, members: tuple[int, ...], filled: list[int]) -> None:
        """Ranks are about to be offered to the others, perhaps those of the guest among them."""
        if self._open is not None:
            plan = msgspec.json.encode(Plan(members, tuple(filled))).decode()
            with contextlib.suppress(DistError, RuntimeError):
                self._store.set(f"{_PLAN}/{self._open.number}", plan)

    def refuse(self, why: str) -> None:
        """The guest's ranks are not taken in: it is to join the rendezvous."""
        if self._open is not None and self._ready:
            with contextlib.suppress(DistError, RuntimeError):
                self._store.set(f"{_REFUSED}/{self._open.number}", why)
            self._able = False
            self._close()

    def end(self) -> None:
        """The job has ended: a guest hears so, whether it is ready or still starting its ranks. Idempotent."""
        self._able = False
        if self._open is not None:
            with contextlib.suppress(DistError, RuntimeError):
                self._store.set(f"{_REFUSED}/{self._open.number}", ENDED)
            self._close()

    def close(self) -> None:
        """The ranks of the attempt are to end, or have. Idempotent."""
        if self._marker is not None:
            self._marker.remove()

    def _close(self) -> None:
        with contextlib.suppress(DistError, RuntimeError):
            self._store.set(_INVITATION, "")
        self._open, self._ready = None, False


class Guest:
    """The side of a launcher that has accepted an invitation, until its ranks are taken in.

    Args:
        store: of the round; round_: its number; handler: torch's, of the rendezvous.
    """

    def __init__(self, invitation: Invitation, store: Any, handler: Any) -> None:
        self.invitation, self._handler = invitation, handler
        self._raw, self._store = store, BoundedStore(store)
        self._round = handler._state_holder.state.round
        self._said, self._next, self._why = False, 0.0, ""
        self._look = Look(Path(invitation.directory), invitation.marker)
        self._beats, self._beat_at = 0, 0.0

    @property
    def code(self) -> Code:
        """What the ranks run that are there."""
        return self.invitation.code

    def ready(self) -> None:
        """All ranks of this host wait for their order. Nobody hears so before it is known to see the directory."""
        if not self._said and self._look.sees:
            with contextlib.suppress(Unanswered):
                self._store.set(f"{_READY}/{self.invitation.number}", "yes")
                self._said = True

    def plan(self) -> Plan | None:
        """How they are to be taken in, once that is known."""
        key = f"{_PLAN}/{self.invitation.number}"
        with contextlib.suppress(Unanswered):
            return msgspec.json.decode(self._store.get(key), type=Plan) if self._store.check(key) else None
        return None

    def refused(self) -> str:
        """Why they will not be taken in; empty while they may be. Asks the store now and then.

        Raises:
            SystemExit: this host does not see the job's directory.
        """
        now = _clock.monotonic()
        if now < self._next:
            return self._why
        if why := self._look.blind:
            self._leave(why)
        self._next, refused = now + LOOK, f"{_REFUSED}/{self.invitation.number}"
        with contextlib.suppress(Unanswered):  # then it is asked again
            if now >= self._beat_at:
                self._beats, self._beat_at = self._beats + 1, now + BEAT
                self._store.set(f"{_ALIVE}/{self.invitation.number}", str(self._beats))
            if self._store.check(refused):
                self._why = self._store.get(refused).decode()
            elif not self._handler.num_nodes_waiting() and self._handler._state_holder.state.round != self._round:
                self._why = "the job has restarted meanwhile"
        return self._why

    def _leave(self, why: str) -> NoReturn:
        """End this launcher. The others go on without it, and their rendezvous stays open."""
        said = f"{os.uname().nodename} stays missing: {why}"
        with contextlib.suppress(DistError, RuntimeError):
            self._store.set(f"{_GONE}/{self.invitation.number}", said)
        vars(self._handler)["shutdown"] = lambda: True  # torch's closes it for all, unless a signal has ended it
        write_error(f"lastgasp: {said}. The other hosts train on without it")
        raise SystemExit(exitcodes.REFUSED)

    @property
    def ended(self) -> bool:
        """Whether they are refused because the job has ended, and well."""
        return self._why == ENDED

    def take_place(self, group: WorkerGroup, spec: WorkerSpec) -> None:
        """Fill in what torch's rendezvous would; each rank has the number of its seat for the time being."""
        one = self.invitation
        first, world = one.group_rank * one.each, one.each * one.hosts
        place: Any = group  # torch's own annotations say None
        place.workers = [
            Worker(local_rank=n, global_rank=first + n, role_rank=first + n, world_size=world, role_world_size=world)
            for n in range(spec.local_world_size)
        ]
        place.store, place.group_rank, place.group_world_size = self._raw, one.group_rank, one.hosts
        place.master_addr, place.master_port = one.master, one.port


def invited(spec: WorkerSpec) -> Guest | None:
    """Accept the invitation of a running job, if there is one for this launcher; None where it is to join as ever.

    One is taken in after the other: this one waits while another one has the invitation.
    """
    if not isinstance(spec.entrypoint, str):  # a function, in processes that are started otherwise
        return None
    handler: Any = spec.rdzv_handler
    me, deadline, told = f"{os.uname().nodename} {os.getpid()}", _clock.monotonic() + TURN, False
    try:
        while (invitation := _invitation(spec)) is not None:
            store = handler._get_store()
            if store.compare_set(f"{_CLAIM}/{invitation.number}", "", me).decode() == me:
                log.info("the job runs without this host: its ranks are to be taken in without a restart")
                return Guest(invitation, store, handler)
            if _clock.monotonic() > deadline:
                return None
            if not told:
                log.info("the job runs without this host, and is about to take in another one: it waits for that")
            told = True
            time.sleep(LOOK)
        return None
    except (AttributeError, DistError, RuntimeError, RendezvousError, msgspec.DecodeError) as error:
        log.debug("no invitation can be read: %s", error)
        return None


def _invitation(spec: WorkerSpec) -> Invitation | None:
    """The one that is there now, if it is for such a launcher."""
    handler: Any = spec.rdzv_handler
    handler.num_nodes_waiting()  # brings the state up to date
    state = handler._state_holder.state
    if not state.complete or state.closed or handler._this_node in state.participants:
        return None
    store = handler._get_store()
    if not store.check([_INVITATION]) or not (found := store.get(_INVITATION)):
        return None
    invitation = msgspec.json.decode(found, type=Invitation)
    fits = spec.local_world_size == invitation.each and not getattr(spec, "virtual_local_rank", False)
    return invitation if fits else None
