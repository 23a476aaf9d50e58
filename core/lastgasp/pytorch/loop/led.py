"""A training in `train` that goes on in the same process by the orders of another leader (`ports.InPlace`).

MindIO's orders come on its own thread while the training thread is parked in the fault: `stop` cuts the collectives
that it is stuck in, `rollback` keeps a copy of the state. The function is then called again, as after any recovery in
place, and begins with that copy; a rank whose own state was damaged takes another rank's through the new process group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from torch._C._distributed_c10d import TCPStore

from lastgasp.deferred_source import DeferredSource
from lastgasp.errors import ControlError, DeadlineExceeded, NotSaveable
from lastgasp.gasp.again import Again
from lastgasp.pytorch.cut import cut_connections, outside
from lastgasp.pytorch.draining import drain
from lastgasp.pytorch.handover import cloned
from lastgasp.pytorch.loop import joining
from lastgasp.pytorch.loop.memory import FromMemory, Held, HeldTraining, Memory
from lastgasp.session import Session
from lastgasp.topology import host_identity

if TYPE_CHECKING:
    from lastgasp.pytorch.loop.again_here import AgainHere

log = logging.getLogger("lastgasp")

NO_STEP = "no step was completed since it was entered again"
CONSULT = 15.0
"""Seconds for the controller to say what it keeps of other ranks' random states."""


class Peer(msgspec.Struct, frozen=True):
    """One rank of a training that is led: where its process is, and why it cannot be entered again, or empty.

    Attributes:
        no_recover: why no new process could take a lost rank's place; empty where one could.
    """

    host: str
    pid: int
    ends: tuple[str, ...]
    why: str
    no_recover: str


def meet(session: Session, why: str, no_recover: str) -> tuple[tuple[Peer, ...], str, str]:
    """All ranks, and why some cannot go on in place; the same on each, which call it together once groups are made.

    Args:
        why, no_recover: of this rank, as in `Peer`; the same of any rank are returned.
    """
    own = Peer(host_identity(), os.getpid(), outside(), why, no_recover)
    try:
        parts = session.gather("led", msgspec.json.encode(own))
    except (ControlError, DeadlineExceeded) as error:
        return (), (found := f"the ranks could not be asked: {error}"), found
    peers = tuple(msgspec.json.decode(part, type=Peer) for part in parts)
    found = next((f"rank {rank}: {peer.why}" for rank, peer in enumerate(peers) if peer.why), "")
    return peers, found, next((peer.no_recover for peer in peers if peer.no_recover), "")


class Led:
    """One per entry of the training; implements `ports.InPlace`.

    Args:
        here: of the training's run. peers: of all ranks.
    """

    def __init__(self, here: AgainHere, peers: tuple[Peer, ...]) -> None:
        host = host_identity()
        self._here, self._run = here, here.run
        self._pids = tuple(peer.pid for peer in peers if peer.host == host)
        self._ends = tuple(end for peer in peers if peer.host != host for end in peer.ends)
        self._memory: Memory | None = None
        self._takes = self._over = False
        self._lost = tuple[int, ...]()

    # -- MindIO's thread ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cut the connections between the ranks: a collective that waits for others raises."""
        cut_connections(self._pids, self._ends)

    def clean(self, memory_error: bool) -> int:
        """1 where the training cannot be entered again now: the step is then saved, and the job restarts."""
        self._lost = ()
        why = self._cannot()
        if why:
            log.warning("rank %d cannot go on in this process: %s", self._run.place.rank, why)
        return 1 if why else 0

    def _cannot(self) -> str:
        return NO_STEP if self._over else self._here.cannot_now()

    def rebuild(self, ranks: list[int]) -> None:
        """Agree where all meet: the function makes its process groups itself.

        Raises:
            NotSaveable: this rank cannot go on. MindIO can order a dump then, as it cannot after a `clean` that failed.
        """
        place, why = joining.meeting(), self._cannot()
        if place is None or why:
            raise NotSaveable(why or f"no new process can take a lost rank's place: {joining.why_not()}")
        place.rebuild(tuple(ranks))
        self._lost = tuple(ranks)

    def repair(self, step: int, pairs: Mapping[str, Any], rebuild: bool) -> None:
        """The state is handed over when all ranks have entered the training again (`handover`).

        Raises:
            NotSaveable: the ranks do not hold the same, so that none can take another one's state.
        """
        if not self._run.life.alike:
            raise NotSaveable("the ranks were found to hold different states: none can take another one's")
        self._takes = self._run.place.rank in pairs["dst"]

    def rollback(self, step: int) -> None:
        """Keep what this rank has of `step`; another fault from now on is answered with that copy.

        Raises:
            NotSaveable: this rank has none.
        """
        run = self._run
        if why := self._cannot():
            raise NotSaveable(why)
        if self._lost and (place := joining.meeting()) is not None:
            place.look()
        training: HeldTraining
        if self._takes:
            training = HeldTraining(DeferredSource(run.place.rank))
        else:
            self._memory = self._kept(step)
            training = HeldTraining(FromMemory(step, self._here.source_of(self._memory, run.place)))
        run.life.bind(training)
        self._over = True

    def synchronize(self) -> None:
        """Let the device end what is queued."""
        drain()

    def _kept(self, step: int) -> Memory:
        run, here = self._run, self._here
        aux = dict(run.life.session.auxiliary(step, CONSULT))
        own = run.source.capture(step)
        if not own:
            raise NotSaveable(f"rank {run.place.rank} has no random state of step {step}")
        aux[run.place.rank] = own
        durable = run.life.session.status.durable
        return Memory(step, cloned(run.dump(step, aux)), durable, here.present())

    # -- the training thread ------------------------------------------------------------------------------

    def keep(self, again: Again) -> None:
        """The repair is over: let go of this call of the function, and agree where the next one's ranks meet."""
        run, here = self._run, self._here
        place = joining.meeting() if again.lost else None
        if place is not None:
            found = place.of(again)
        else:
            host, port = _new_store(run.life.session, run.place.rank, again.incarnation)
            found = msgspec.structs.replace(again, port=port, host=host)
        found = msgspec.structs.replace(found, pids=self._pids, ends=self._ends)
        run.life.alike_before = run.life.alike
        held = Held(found, self._memory, run.fit, life=run.life, wrapped=here.let_go(), state=here.state())
        held.users_handler = run.users_handler
        run.entry.keep(held)


_stores: list[Any] = []
"""The newest store that this process has opened for the ranks to meet in."""


def _new_store(session: Session, rank: int, number: int) -> tuple[str, int]:
    """A store that nobody has used, in rank 0's process, which all ranks can reach; they call it together."""
    said = b""
    if rank == 0:
        _stores[:] = [TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)]
        said = str(_stores[0].port).encode()
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(session.gather(f"led-store-{number}", said)[0])
