"""A host comes back to a job that goes on without it, and its ranks are taken in with no restart.

The first node's launcher writes an invitation into the store of the rendezvous' current round. A launcher that comes
finds it there and does not join the rendezvous, which would make torchrun restart all ranks: it starts its own, says
when they wait for their order, and the others take them in. Where that fails it joins the rendezvous, as ever.

Built on private names of torch 2.13 (`_state_holder`, `_get_store`); where they differ, nobody accepts an invitation.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import msgspec
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousError

from lastgasp import _clock
from lastgasp.gasp.joining import Code
from lastgasp.launch.bounded import BoundedStore, Unanswered

log = logging.getLogger("lastgasp.launch")

LOOK = 0.2
"""Seconds between two looks into the store."""
ENDED = "the job has ended"
"""Why a guest is refused once the ranks of the first host have completed all that they do."""
_INVITATION, _CLAIM, _READY, _PLAN, _REFUSED = (f"lastgasp/guest/{name}" for name in (
    "invitation", "claim", "ready", "plan", "refused"
))  # fmt: skip


class Invitation(msgspec.Struct, frozen=True):
    """What a launcher needs to take the place of one that is lost.

    Attributes:
        number: counts the invitations of a round.
        group_rank, hosts: of the place, and how many launchers the complete job has; each: ranks of a host.
        master, port: torch's, of the round.
        code: what the ranks that are there run.
    """

    number: int
    group_rank: int
    hosts: int
    each: int
    master: str
    port: int
    code: Code


class Plan(msgspec.Struct, frozen=True):
    """How the ranks of a guest are taken in: `Again.members`, and the seat of each."""

    members: tuple[int, ...]
    filled: tuple[int, ...]


class Host:
    """The first node's side: invites a launcher to the place of a lost one, one at a time. Never raises.

    Args:
        group: the workers of this host; seats and ranks of the complete job are those that it began with.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group, self._each = group, len(group.workers)
        self._store = BoundedStore(group.store)
        self._hosts = group.group_world_size or 1
        world = group.workers[0].world_size if group.workers else 0
        self._able = self._hosts > 1 and world == self._each * self._hosts
        self._open: Invitation | None = None
        self._count, self._next, self._ready = 0, 0.0, False

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
        if self._open is not None and self._open.group_rank not in free:
            self._close()
        if self._open is None and free and code:
            self._count += 1
            address, port = str(self._group.master_addr), int(self._group.master_port or 0)
            self._open = Invitation(self._count, free[0], self._hosts, self._each, address, port, code)
            store.set(_INVITATION, msgspec.json.encode(self._open).decode())
            log.debug("the launcher of a host may come back without a restart")
        if self._open is not None:
            self._ready = store.check(f"{_READY}/{self._open.number}")

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

    @property
    def code(self) -> Code:
        """What the ranks run that are there."""
        return self.invitation.code

    def ready(self) -> None:
        """All ranks of this host wait for their order."""
        if not self._said:
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
        """Why they will not be taken in; empty while they may be. Asks the store now and then."""
        if _clock.monotonic() < self._next:
            return self._why
        self._next, refused = _clock.monotonic() + LOOK, f"{_REFUSED}/{self.invitation.number}"
        with contextlib.suppress(Unanswered):  # then it is asked again
            if self._store.check(refused):
                self._why = self._store.get(refused).decode()
            elif not self._handler.num_nodes_waiting() and self._handler._state_holder.state.round != self._round:
                self._why = "the job has restarted meanwhile"
        return self._why

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
    """Accept the invitation of a running job, if there is one for this launcher; None where it is to join as ever."""
    handler: Any = spec.rdzv_handler
    if not isinstance(spec.entrypoint, str):  # a function, in processes that are started otherwise
        return None
    try:
        handler.num_nodes_waiting()  # brings the state up to date
        state = handler._state_holder.state
        if not state.complete or state.closed or handler._this_node in state.participants:
            return None
        store = handler._get_store()
        if not store.check([_INVITATION]) or not (found := store.get(_INVITATION)):
            return None
        invitation = msgspec.json.decode(found, type=Invitation)
        if spec.local_world_size != invitation.each or getattr(spec, "virtual_local_rank", False):
            return None
        me = f"{os.uname().nodename} {os.getpid()}"
        if store.compare_set(f"{_CLAIM}/{invitation.number}", "", me).decode() != me:
            return None
        log.info("the job runs without this host: its ranks are to be taken in without a restart")
        return Guest(invitation, store, handler)
    except (AttributeError, DistError, RuntimeError, RendezvousError, msgspec.DecodeError) as error:
        log.debug("no invitation can be read: %s", error)
        return None
