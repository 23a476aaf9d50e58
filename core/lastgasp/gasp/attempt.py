"""One attempt of the job as the controller sees it: the machine, its gathers and its incident."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import xxhash

from lastgasp import _clock
from lastgasp.events import Incident, Unused
from lastgasp.topology import ReplicaGroups

from . import messages as m
from .actions import Action, RecordPhase
from .again import Again, Offer
from .auxiliary import NoBuffers, RankBuffers
from .decision import NO_SAVE, NOT_NEEDED, SavePlan
from .fewer_ranks import by_leader
from .gathers import Gathers
from .groups import unpack
from .ladder import Ladder
from .machine import Machine
from .members import Outcome
from .observer import Observer
from .progress import Progress
from .repeats import LIMIT, Repeats

ENTER = 30.0
"""Seconds, on top of `finish_timeout`, until all ranks of a new incarnation have begun to train."""
IMPORTS = 2.0
"""How many times as long ranks may take for their first start, which imports what a new process is forked with."""
UNUSED_KEPT = 1000
"""At most so many ranks that did not save are named in an incident."""
GROUPS_SHOWN = 64
"""At most so many ranks of differing replica groups are named in an error."""
FROM_ARENAS = "saved from arenas, copies that launchers keep in memory: those of ranks {}"
FROM_BUDDIES = (
    "the shards of ranks {ranks}, whose host was lost, were saved from copies on partner hosts, which are of step "
    "{step}: {lost} completed steps are done again"
)


@dataclass
class Attempt:
    """State of one attempt; made by the first rank that joins.

    A script may have several trainings, one after the other. A rank may come to the next one while others are still in
    the one before.
    """

    hello: m.Hello
    machine: Machine
    own: Machine | None = None
    """The machine that leads again when another leader has left."""
    there: set[int] = field(default_factory=set)
    """Ranks that have come to the newest training."""
    training: int = 0
    """How many trainings were before it in this incarnation; also those of other directories."""
    entered: bool = False
    """It is entered again after a fault."""
    begun: set[int] = field(default_factory=set)
    """Ranks whose training has begun."""
    begun_at: int | None = None
    """The oldest step from which one of them started."""
    reached: int = -1
    gathers: Gathers = field(default_factory=Gathers)
    incident: Incident | None = None
    over_since: float | None = None
    notes: list[str] = field(default_factory=list)
    """Notes for the current incident, or for the next one."""
    progressed_before: bool = False
    """An earlier incarnation or training of this attempt completed a new step."""
    replaced: tuple[int, ...] = ()
    """Ranks that got a new process in this attempt, oldest first."""
    unprotected: bool = False
    """Its ranks only register and mark (`lastgasp.unprotected`): no recovery will follow a death."""
    before: Repeats = field(default_factory=Repeats)
    """How often in a row the incarnations before ended by one exception."""
    trained_s: list[float] = field(default_factory=list)
    """When the first rank began to train and when the first fault was seen, monotonic seconds."""
    moved: bool = False
    """An unprotected rank has completed a step, or something like it."""
    raised: int = 0
    """In how many recoveries in place in a row a rank has raised before there was a new step."""

    @classmethod
    def of(cls, hello: m.Hello, buffers: RankBuffers | None = None) -> Attempt:
        """Create the attempt from the first rank's Hello, with which the others' must agree; and what ranks record."""
        machine = Ladder(
            replicas=unpack(hello.replicas),
            world_size=hello.world_size,
            finish_timeout=hello.finish_timeout,
            save_timeout=hello.save_timeout,
            progress=Progress(limit=hello.hang_timeout),
            buffers=buffers or NoBuffers(),
            incarnation=hello.incarnation,
        )
        return cls(hello=hello, machine=machine)

    def disagreement(self, hello: m.Hello) -> str:
        """Which settings of a rank differ from the first rank's; empty when they agree."""
        for name in _SAME:
            mine, theirs = getattr(self.hello, name), getattr(hello, name)
            if name == "replicas" and mine != theirs:  # other zlib versions may pack the same groups differently
                mine, theirs = _shown(unpack(mine)), _shown(unpack(theirs))
            if mine != theirs:
                return (
                    f"{name}={theirs!r} on rank {hello.rank}, but {mine!r} on rank {self.hello.rank}: "
                    "all ranks of a job must be started alike"
                )
        member = self.machine.members.get(hello.rank)
        gives_way = isinstance(self.machine, Observer) and self.machine.gives_way(hello.rank)
        if member is not None and member.here and not gives_way:
            return f"rank={hello.rank} has joined already: two processes claim the same rank"
        return ""

    def was_ended_by(self, *ranks: int) -> bool:
        """Whether these ranks have trained to the end."""
        members = self.machine.members
        return all(rank in members and members[rank].left for rank in ranks)

    def was_ended(self) -> bool:
        """Whether all have."""
        return self.was_ended_by(*range(self.hello.world_size))

    def joined(self, rank: int, now: float, pid: int) -> list[Action]:
        """As the machine's; but what is known of one training of the script is nothing to the next one."""
        if rank in self.there and self.was_ended_by(rank):
            self.progressed_before, self.there, self.training = self.progressed, set(), self.training + 1
            self.entered, self.begun, self.begun_at, self.reached, self.trained_s = False, set(), None, -1, []
            for machine in (self.machine, self.own):
                if isinstance(machine, Ladder):
                    machine.next_training()
        self.there.add(rank)
        return self.machine.joined(rank, now, pid)

    def leaves(self, hello: m.Hello) -> tuple[int, bool]:
        """What its arenas are worth to the attempt that this rank begins.

        Returns:
            The newest step on disk; whether its ranks enter their training again. To another training of the same
            script they are worth nothing: as if there were any step on disk.
        """
        again = hello.incarnation != self.hello.incarnation
        same = hello.attempt == self.hello.attempt
        return (self.newest_durable, same) if again or not same else (sys.maxsize, False)

    def heard_step(self, rank: int, message: m.Begin | m.Status | m.Prepared) -> None:
        """Track whether this attempt made progress; a rank's heartbeats before its Begin are ignored."""
        if isinstance(message, m.Begin):
            self.begun.add(rank)
            self.trained_s = self.trained_s or [_clock.monotonic()]
            self.begun_at = message.step if self.begun_at is None else min(self.begun_at, message.step)
        if rank in self.begun:
            self.reached = max(self.reached, message.step)
        elif self.unprotected and isinstance(message, m.Status):
            self.moved = self.moved or message.tick > 0

    def led_by(self, leader: str) -> None:
        """Hand the recoveries of this attempt to another leader, or back, as the first rank requests. Idempotent."""
        following = isinstance(self.machine, Observer)
        if leader and not following:
            self.own, self.machine = self.machine, Observer.following(self.machine, leader)
        elif not leader and following and self.own is not None and self.machine.state == "running":
            self.machine = self.own

    @property
    def again(self) -> Again | None:
        """What was agreed for a recovery in place that has ended this incarnation."""
        return self.machine.again if isinstance(self.machine, Ladder | Observer) else None

    @property
    def hung(self) -> list[int]:
        """Ranks that count as hung."""
        return [rank for rank, member in self.machine.members.items() if member.hung]

    def misses(self, exited: m.Exited) -> bool:
        """Whether this process of another host was to enter the next incarnation."""
        again = self.again if self.hello.attempt == exited.attempt else None
        return again is not None and again.misses(exited.rank, exited.incarnation)

    def agreed(self) -> m.Agreed:
        """How the recovery has ended, for the launchers of other hosts."""
        again = self.again if self.again is None else msgspec.structs.replace(self.again, aux={}, pids=(), ends=())
        return m.Agreed(attempt=self.hello.attempt, ending=self.machine.outcome.ending, again=again)

    def enters_after(self, again: Again | None) -> None:
        """What was agreed with the incarnation before: who begins with files takes as long as for any start."""
        if not isinstance(self.machine, Ladder) or again is None:
            return
        self.entered, world_size = True, self.hello.world_size
        if again.from_files:
            self.machine.loads, self.machine.absent = True, lambda now: self.gathers.absent(now, world_size)
        else:
            self.machine.enter_by = _clock.monotonic() + self.hello.finish_timeout + ENTER
            takers = again.for_rank(-1).takers
            self.machine.holders = frozenset(range(world_size)).difference(takers)

    def follows(self, repeats: Repeats) -> None:
        """How often in a row the incarnations before this one ended by one exception."""
        self.before = repeats
        if isinstance(self.machine, Ladder) and repeats.count >= LIMIT - 1:
            self.machine.weary = f"the same exception has ended the training {repeats.count} times in a row"

    def learns(self, before: Attempt) -> None:
        """A recovery in place that led to no new step is not tried again: the next one would cost as much time.

        A process that is killed meanwhile says nothing of the next one. What raises once more may pass a little later
        (a file server), and has taken no long wait: it is tried again, unless the next one ends so, too.
        """
        machine, earlier = self.machine, before.machine
        if not (isinstance(machine, Ladder) and isinstance(earlier, Ladder)):
            return
        machine.unwise = earlier.unwise
        machine.in_vain = before.entered and not before.progressed_now
        self.raised = 0 if before.entered and before.progressed_now else before.raised
        if before.hello.attempt == self.hello.attempt:
            machine.slow = earlier.slow
        elif earlier.again is not None:
            machine.unwise = "no rank came back in an earlier recovery in place of this job"
        if earlier.stayed:
            machine.unwise = f"rank {earlier.stayed[0]} hung in an earlier recovery in place of this job"
        failed = [fault for fault in earlier.faults if fault.kind in ("hang", "exception")]
        if failed and before.entered and not before.progressed_now:
            self.raised += 1
            hung = [fault for fault in failed if fault.kind == "hang"]
            if hung:
                machine.unwise = f"rank {hung[0].rank} hung in an earlier recovery in place of this job"
            elif self.raised > 1:
                machine.unwise = "in the last two recoveries in place of this job a rank raised an exception"

    def took(self, rank: int, seconds: float) -> None:
        """A rank is about to begin, so long after its process was started."""
        machine, limit = self.machine, self.hello.finish_timeout + ENTER
        first = not self.hello.incarnation and not self.training
        if isinstance(machine, Ladder) and first and seconds > IMPORTS * limit:
            machine.slow = (f"rank {rank} took {seconds:.0f} s from its start until it trained, and a new process has "
                            f"{limit:.0f} s")  # fmt: skip

    def offered(self, offer: Offer) -> None:
        """The launcher says what it can do for a recovery in place."""
        machine, hello = self.machine, self.hello
        if isinstance(machine, Ladder) and (hello.attempt, hello.incarnation + 1) == (offer.attempt, offer.incarnation):
            machine.offer = offer

    @property
    def progressed(self) -> bool:
        """At least one step was completed in this attempt."""
        return self.progressed_before or self.progressed_now

    @property
    def progressed_now(self) -> bool:
        """At least one step was completed in this incarnation."""
        return self.moved or (self.begun_at is not None and self.reached > self.begun_at)

    @property
    def repeats(self) -> Repeats:
        """The same, with this one. One that did not come to train does not count."""
        if self.begun_at is None or len(self.trained_s) < 2:
            return self.before
        steps, (begun, ended) = self.reached - self.begun_at, self.trained_s
        return self.before.then(self.machine.faults, steps, ended - begun)

    @property
    def newest_held(self) -> int:
        """The step from which the next attempt starts, if known."""
        held = self.machine.outcome.step if self.machine.outcome.ending == "in_place" else None
        return max(self.newest_durable, held if held is not None else 0)

    @property
    def newest_durable(self) -> int:
        """The newest step on disk, as far as this attempt knows."""
        durable = max((member.durable for member in self.machine.members.values()), default=0)
        written = self.machine.outcome.ending == "saved" or (self.again is not None and self.again.saved)
        saved = self.machine.outcome.step if written else None
        return max(durable, saved if saved is not None else 0)

    # -- gathers ----------------------------------------------------------------------------------

    def gather(self, rank: int, part: m.GatherPart) -> m.Gathered | None:
        """Store one part; return all parts when it was the last one."""
        return self.gathers.put(rank, part, self.hello.world_size, _clock.monotonic())

    def failed_gathers(self, now: float, why: str = "") -> list[tuple[int, m.Gathered]]:
        """Build answers for gathers that cannot complete: all of them if `why` is given."""
        return self.gathers.failed(now, why, self.machine.lost, self.hello.world_size)

    # -- incident ---------------------------------------------------------------------------------

    def note(self, note: RecordPhase) -> None:
        """Record the time of a phase; open the incident at the first one and complete it at the last."""
        if note.phase == "called_off":
            self.incident, self.trained_s = None, self.trained_s[:1]
            return
        now = _clock.wall_ns()
        if self.incident is None:
            self.trained_s = [*self.trained_s[:1], _clock.monotonic()]
            self.incident = new_incident(self.hello, self.machine.recovery, now)
            self.incident.notes = self.notes
            if isinstance(self.machine, Observer):
                leader = self.machine.leader
                self.incident.led_by, self.incident.backend = leader, leader.partition(" ")[0].lower()
        setattr(self.incident.phases, note.phase, now)
        if note.phase == "released":
            self.over_since = _clock.monotonic()
            self.refresh()

    def over_again(self) -> None:
        """The incident is on record, and its ranks go on training: the next fault is another incident."""
        self.incident, self.over_since, self.notes, self.trained_s = None, None, [], [_clock.monotonic()]
        if isinstance(self.machine, Observer):
            self.machine.renew()

    def led_again(self, hello: m.Hello) -> Incident | None:
        """A rank joins as a newer attempt or incarnation; what another leader has agreed on is carried out then.

        Returns:
            The record of that, if so.
        """
        machine = self.machine
        if not isinstance(machine, Observer) or machine.again is None or hello.attempt != self.hello.attempt:
            return None
        machine.goes_on()
        self.note(RecordPhase(phase="released"))
        return self.incident

    @property
    def recovers(self) -> bool:
        """Whether there was a fault, and no new step has been completed since."""
        return self.incident is not None and self.incident.phases.first_step is None

    def refresh(self) -> None:
        """Update the incident from the state machine; causes of death become known a little later."""
        if self.incident is not None:
            fill_incident(self.incident, self.machine)
            if isinstance(self.machine, Observer) and self.machine.leading:
                self.incident.led_by = f"{self.machine.leader}, then controller"


def _shown(groups: ReplicaGroups) -> str | ReplicaGroups:
    """All groups, or a summary with their number, a digest and the first ones."""
    if sum(map(len, groups)) <= GROUPS_SHOWN:
        return groups
    digest = xxhash.xxh3_64_hexdigest(repr(groups).encode())
    return f"{len(groups)} groups ({digest}), the first {groups[0][:GROUPS_SHOWN]}"


_SAME = (
    "job",
    "attempt",
    "world_size",
    "replicas",
    "directory",
    "hang_timeout",
    "save_timeout",
    "finish_timeout",
)


def new_incident(hello: m.Hello, recovery: int, now_ns: int, led_by: str = "controller") -> Incident:
    """Create an open incident, whose id sorts by time."""
    stamp = f"{now_ns // 1_000_000}"
    return Incident(
        id=f"{stamp}-attempt{hello.attempt}-{os.getpid()}-{recovery}",
        job=hello.job,
        attempt=hello.attempt,
        world_size=hello.world_size,
        incarnation=hello.incarnation,
        led_by=led_by,
    )


def fill_incident(incident: Incident, machine: Machine) -> None:
    """Copy the state machine's outcome. Where a cause is known, ranks that only saw their peers fail are left out."""
    causes = [fault for fault in machine.faults if fault.kind != "peer"]
    incident.faults = causes or list(machine.faults)
    incident.phases.fault = min((fault.seen_ns for fault in incident.faults), default=None)
    out = machine.outcome
    incident.ending, incident.reason, incident.step_saved = out.ending, out.reason, out.step
    incident.steps_lost, incident.nbytes, incident.files = (
        out.lost,
        out.nbytes,
        [out.path] if out.path else [],
    )
    incident.phases.first_byte, incident.savers = out.first_byte_ns, sorted(set(out.savers))
    # Bounded: of tens of thousands of ranks most were simply not needed for the save.
    incident.unused = list(out.unused if len(out.unused) <= UNUSED_KEPT else _with_a_reason(out.unused))[:UNUSED_KEPT]
    if isinstance(machine, Ladder):
        incident.not_in_place = machine.not_in_place
        incident.rung = machine.again.rung if machine.again is not None else ""
        incident.from_files = machine.again is not None and machine.again.from_files
        told = (note for note in (machine.shrunk, machine.grown) if note and note not in incident.notes)
        incident.notes.extend(told)
    elif isinstance(machine, Observer) and out.ending == "in_place":
        incident.from_files = machine.from_files
        if machine.again is not None:
            incident.rung, note = machine.again.rung, by_leader(machine.leader, machine.again, machine.world_size)
            incident.notes += [note] if note not in incident.notes else []
    if out.ending not in ("saved", "in_place", "in_arenas"):
        incident.step_saved = None
    notes = [*holder_notes(out), *([machine.unlike] if machine.unlike else [])]
    incident.notes += [note for note in notes if note not in incident.notes]


def notes_of(plan: SavePlan) -> list[str]:
    """Which shards were not written by who held them."""
    outcome = Outcome()
    outcome.planned(plan)
    return holder_notes(outcome)


def holder_notes(out: Outcome) -> list[str]:
    """The same of a recovery."""
    notes = [FROM_ARENAS.format(", ".join(map(str, out.arenas)))] if out.arenas else []
    if out.buddies:
        notes.append(FROM_BUDDIES.format(ranks=", ".join(map(str, out.buddies)), step=out.step, lost=out.lost))
    return notes


def _with_a_reason(unused: Iterable[Unused]) -> list[Unused]:
    return [one for one in unused if one.why not in (NOT_NEEDED, NO_SAVE)]
