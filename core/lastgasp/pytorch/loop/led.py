"""A training in `train` that goes on in the same process by the orders of another leader (`ports.InPlace`).

MindIO's orders come on its own thread while the training thread is parked in the fault: `stop` cuts the collectives
that it is stuck in, `rollback` keeps a copy of the state. The function is then called again, as after any recovery in
place, and begins with that copy; a rank whose own state was damaged takes another rank's through the new process group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from torch._C._distributed_c10d import TCPStore

from lastgasp import _clock
from lastgasp.adapter.run import AdapterRun
from lastgasp.deferred_source import DeferredSource
from lastgasp.errors import ControlError, DeadlineExceeded, NotSaveable
from lastgasp.gasp.again import NEW, Again
from lastgasp.gasp.fewer_ranks import cannot_share
from lastgasp.gasp.going_on import Fewer, Resize
from lastgasp.pytorch.cut import cut_connections, outside
from lastgasp.pytorch.draining import drain
from lastgasp.pytorch.handover import cloned
from lastgasp.pytorch.loop import joining
from lastgasp.pytorch.loop.memory import FromMemory, Held, HeldTraining, Memory
from lastgasp.pytorch.loop.record import KEY
from lastgasp.pytorch.loop.renumber import numbered, place_after
from lastgasp.session import Session
from lastgasp.topology import Place, host_identity

if TYPE_CHECKING:
    from lastgasp.pytorch.loop.again_here import AgainHere

log = logging.getLogger("lastgasp")

NO_STEP = "no step was completed since it was entered again"
LONGEST_ENTRY = 1800.0
"""Seconds that a training which is entered again may take to its first step before it counts as hung, as at a start."""
CONSULT = 15.0
"""Seconds for the controller to say what it keeps of other ranks' random states."""
NOT_FEWER = "its data do not come from an ElasticLoader, which has missing ranks' micro-batches done by the others"


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
        why, no_recover: of this rank, as in `Peer`; those of any rank are returned.
    """
    own = Peer(host_identity(), os.getpid(), outside(), why, no_recover)
    try:
        parts = session.gather("led", msgspec.json.encode(own))
    except (ControlError, DeadlineExceeded) as error:
        return (), (found := f"the ranks could not be asked: {error}"), found
    peers = tuple(msgspec.json.decode(part, type=Peer) for part in parts)
    found = next((f"rank {rank}: {peer.why}" for rank, peer in enumerate(peers) if peer.why), "")
    return peers, found, next((peer.no_recover for peer in peers if peer.no_recover), "")


def why_no_new_process(session: Session, place: Place, recovery: str) -> str:
    """Why no new process could take a lost rank's place in this training; empty where one could. Every rank asks.

    Args:
        place: of this rank. recovery: as the user wants it.
    """
    meeting = joining.meeting()
    if meeting is None or session.contact is None:
        return joining.why_not() or "the job has no controller, which a new process would have to join"
    if place.rank == 0:
        try:
            meeting.tell(session.contact, place)
        except RuntimeError as error:
            return f"the store of torch's agent does not answer: {error}"
    return "" if recovery == "auto" else f"recovery={recovery}"


class Orders:
    """MindIO's orders, as far as they are the same wherever the training begins again; implements
    `ports.GoesOnWithFewer`.

    One per entry of the training.

    Args:
        life: the training's. peers: of all ranks.

    Attributes:
        gives, takes: this rank's state goes to another one, or it needs another one's.
    """

    from_files = False

    def __init__(self, life: AdapterRun, peers: tuple[Peer, ...]) -> None:
        host = host_identity()
        self.life = life
        self._pids = tuple(peer.pid for peer in peers if peer.host == host)
        self._ends = tuple(end for peer in peers if peer.host != host for end in peer.ends)
        self.gives = self.takes = self._over = False
        self._lost = tuple[int, ...]()
        self.no_fewer, self._fewer = NOT_FEWER, Fewer()

    def cannot_now(self) -> str:
        """Why the training cannot be entered again at this moment; empty if it can."""
        raise NotImplementedError

    def roll_back(self, step: int) -> None:
        """Keep what this rank begins with. Raises what `rollback` may raise."""
        raise NotImplementedError

    def agree_on_fewer(self, fewer: Fewer) -> None:
        """It is known what is trained with: can it go on without a lost rank? All ranks call it together.

        Args:
            fewer: what this rank knows of it.
        """
        self._fewer = fewer
        try:
            parts = self.life.session.gather("led-fewer", fewer.why.encode())
        except (ControlError, DeadlineExceeded) as error:
            self.no_fewer = f"the ranks could not be asked: {error}"
            return
        self.no_fewer = next((part.decode() for part in parts if part), "")

    # -- MindIO's thread ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cut the connections between the ranks: a collective that waits for others raises."""
        cut_connections(self._pids, self._ends)

    def clean(self, memory_error: bool) -> int:
        """1 where the training cannot be entered again now: the step is then saved, and the job restarts."""
        self._lost, self.gives, self.takes = (), False, False
        why = self._cannot()
        if why:
            log.warning("rank %d cannot go on in this process: %s", self.life.place.rank, why)
        return 1 if why else 0

    def _cannot(self) -> str:
        return NO_STEP if self._over else self.cannot_now()

    def rebuild(self, ranks: list[int]) -> None:
        """Agree where all meet: the training makes its process groups itself.

        Raises:
            NotSaveable: this rank cannot go on. MindIO can order a dump then, as it cannot after a `clean` that failed.
        """
        place, why = joining.meeting(), self._cannot()
        if place is None or why:
            raise NotSaveable(why or f"no new process can take a lost rank's place: {joining.why_not()}")
        place.rebuild(tuple(ranks))
        self._lost = tuple(ranks)

    def repair(self, step: int, pairs: Mapping[str, Any], rebuild: bool) -> None:
        """The state is handed over when all ranks have entered the training again.

        Raises:
            NotSaveable: the ranks do not hold the same, so that none can take another one's state.
        """
        if not self.life.alike:
            raise NotSaveable("the ranks were found to hold different states: none can take another one's")
        rank = self.life.place.rank
        self.takes, self.gives = rank in pairs["dst"], rank in pairs["src"] and rank not in pairs["dst"]

    def rollback(self, step: int) -> None:
        """Another fault from now on is answered with what this rank keeps of `step`.

        Raises:
            NotSaveable: this rank cannot go on, or has nothing of that step.
        """
        if why := self._cannot():
            raise NotSaveable(why)
        if self._lost and (place := joining.meeting()) is not None:
            place.look()
        self.roll_back(step)
        self._over = True

    def takes_in(self, ranks: tuple[int, ...]) -> None:
        """As in `ports.GoesOnWithFewer`."""
        place, why = joining.meeting(), self._cannot_resize()
        if place is None or why:
            raise NotSaveable(why or f"no new process can take a missing rank's place: {joining.why_not()}")
        place.rebuild(ranks, grows=True)
        self._lost = ranks

    def _cannot_resize(self) -> str:
        if why := self.no_fewer or self.life.session.status.no_fewer or self._cannot():
            return why
        differ = "the ranks were found to hold different states: none can do a missing one's part, or give it its own"
        return "" if self.life.alike else differ

    def resize(self, incarnation: int, step: int, members: tuple[int, ...], gives: bool) -> None:
        """As in `ports.GoesOnWithFewer`: nothing but memory changes before the training thread goes on (`keep`)."""
        rank = self.life.place.rank
        if why := self._cannot_resize() or cannot_share([rank], {rank: self._fewer}, len(members)):
            raise NotSaveable(why)
        place = joining.meeting() if NEW in members else None
        if place is not None:
            place.look()
        self.gives = gives
        self.roll_back(step)
        said = Resize(incarnation=incarnation, step=step, members=members)
        if why := self.life.session.agree(said, CONSULT):
            raise NotSaveable(f"the controller does not let these ranks go on so: {why}")
        self._over = True

    def synchronize(self) -> None:
        """Let the device end what is queued."""
        drain()

    # -- the training thread ------------------------------------------------------------------------------

    def agreed(self, again: Again) -> Again:
        """The repair is over: agree where the ranks of the next entry meet. All call it together.

        Raises:
            ControlError, DeadlineExceeded: another rank is lost, or does not come.
        """
        session = self.life.session
        place = joining.meeting() if again.lost else None
        if place is not None:
            found = place.of(again)
        else:
            host, port = _new_store(session, self.life.place.rank, again.incarnation)
            found = msgspec.structs.replace(again, port=port, host=host)
        session.status.paused = _clock.monotonic() + LONGEST_ENTRY
        return msgspec.structs.replace(found, pids=self._pids, ends=self._ends)


class Led(Orders):
    """Of a training that begins with what its ranks keep in memory.

    Args:
        here: of the training's run. peers: of all ranks.
    """

    def __init__(self, here: AgainHere, peers: tuple[Peer, ...]) -> None:
        super().__init__(here.run.life, peers)
        self._here, self._run = here, here.run
        self._memory: Memory | None = None

    def cannot_now(self) -> str:
        """As in the base."""
        return self._here.cannot_now()

    def roll_back(self, step: int) -> None:
        """Keep a copy of `step`."""
        run, here = self._run, self._here
        here.before_dump(step)
        training: HeldTraining
        if self.takes:
            training = HeldTraining(DeferredSource(run.place.rank))
        else:
            self._memory = self._kept(step)
            training = HeldTraining(FromMemory(step, here.source_of(self._memory, run.place)))
        run.life.bind(training)

    def _kept(self, step: int) -> Memory:
        run, here = self._run, self._here
        aux = dict(run.life.session.auxiliary(step, CONSULT))
        own = run.source.capture(step)
        if not own:
            raise NotSaveable(f"rank {run.place.rank} has no random state of step {step}")
        aux[run.place.rank] = own
        durable, values = run.life.session.status.durable, here.values() if self.gives else b""
        return Memory(step, cloned(run.dump(step, aux)), durable, here.present(), values)

    def _join_resized(self, again: Again) -> None:
        """On the training thread: join the controller by the new number, with the same step.

        Raises:
            ControlError, DeadlineExceeded: it refused this rank or is not there.
        """
        run, memory = self._run, self._memory
        assert memory is not None
        place = place_after(run.place, again)
        run.life.joins_again(place)
        checkpoint = {**memory.checkpoint, KEY: dict(memory.checkpoint[KEY])}  # a dump may be writing it
        self._memory = replace(memory, checkpoint=self._here.renumbered(checkpoint, again))
        run.life.bind(HeldTraining(FromMemory(memory.step, self._here.source_of(self._memory, place))))
        if NEW in again.members:  # they join later; of the others the controller knows that they hold the same step
            return
        steps = [int(part) for part in run.life.session.gather("led-step", str(memory.step).encode())]
        if set(steps) != {memory.step}:
            raise NotSaveable(f"the ranks that go on hold different steps: {steps}")

    def keep(self, again: Again) -> None:
        """Let go of this call of the function, and agree where the next one's ranks meet."""
        run, here = self._run, self._here
        if again.members:
            self._join_resized(again)
        found = numbered(self.agreed(again), run.place.rank)
        run.life.alike_before = run.life.alike
        held = Held(found, self._memory, run.fit, life=run.life, wrapped=here.let_go(again), state=here.state())
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
