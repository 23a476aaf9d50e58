"""The state machine of a job led by another backend (MindIO): it stores, records and releases, but gives no orders.

It adds what MindIO lacks: the auxiliary state of dead ranks, the data that savers pass to the publishing rank, the
incident record, a message to all ranks about the outcome, and killing hung ranks (MindIO notices only processes that
ended, mindio_tft.md §7.1). If MindIO ends without a checkpoint, or never starts one (§16.4-6), this machine takes the
lead like the embedded engine; what MindIO does to the ranks ten seconds later waits for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lastgasp.events import Fault, Unused

from . import messages as m
from .actions import Action, Kill, RecordPhase, Send, WentOn
from .again import NEW, Again
from .auxiliary import auxiliary_states
from .known_faults import KnownFaults
from .machine import Handler, Machine
from .members import Member, Outcome
from .views import why_unusable

PATIENCE = 40.0
"""Seconds from a fault until the leader must have ordered a save: 8 to 12 until it notices, 2 and 5 to check again, and
half a minute in which ranks reach the step (docs/facts/mindio_tft.md §12)."""
IN_MINDX = "MindIO in TaskD"
"""The leader's name where TaskD decides, for which there is no time limit."""


@dataclass
class Observer(Machine):
    """The state machine of an attempt led by `leader`."""

    leader: str = ""
    leading: bool = False
    """Whether this machine has taken the lead."""
    from_files: bool = False
    """Entered again, its ranks begin with the newest checkpoint."""
    again: Again | None = None
    """What the leader has agreed with those that go on, fewer or with new ones: they may join as this incarnation."""
    _kept: dict[int, m.Saved] = field(default_factory=dict)
    _asked: bool = False
    _begun_again: set[int] = field(default_factory=set)
    """Ranks that have begun again since the fault: those that went on, and new processes."""
    _patient_until: float = math.inf

    @classmethod
    def following(cls, machine: Machine, leader: str) -> Observer:
        """Continue from `machine`, which has given no order yet."""
        return cls(
            replicas=machine.replicas,
            world_size=machine.world_size,
            finish_timeout=machine.finish_timeout,
            save_timeout=machine.save_timeout,
            progress=machine.progress,
            buffers=machine.buffers,
            members=machine.members,
            unlike=machine.unlike,
            lost=machine.lost,
            leader=leader,
            _here=machine._here,
        )

    def joined(self, rank: int, now: float, pid: int = 0) -> list[Action]:
        """A rank has authenticated, possibly one restarted by the leader in the middle of the job."""
        if self.leading or self.state == "over":
            return super().joined(rank, now, pid)
        self._admit(rank, now, pid)
        self._begun_again.discard(rank)
        return []

    def gives_way(self, rank: int) -> bool:
        """Whether its process has said that the leader has another one take its place: it may still live then."""
        fault = self.members[rank].fault if rank in self.members else None
        return not self.leading and fault is not None and fault.kind == "killed"

    def _on_begin(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        """Once all have begun again after a fault, the leader has repaired it in place."""
        assert isinstance(message, m.Begin)
        self.from_files = self.from_files or message.from_files
        super()._on_begin(member, message, now)
        if member.fault is not None and self.gives_way(member.rank):  # it goes on itself: another rank was moved
            self.faults.forget(member.fault)
            self.lost.pop(member.rank, None)
            member.fault = None
        if self.leading or self.state != "preparing":
            return []
        self._begun_again.add(member.rank)
        if len(self._begun_again & self._here) < self.world_size:
            return []
        reached = max((fault.step for fault in self.faults), default=message.step)
        self.outcome.ending, self.outcome.step = "in_place", message.step
        self.outcome.lost = max(0, reached - message.step)
        self.state = "running"
        replaced = tuple(sorted({fault.rank for fault in self.faults if fault.kind != "peer"}))
        return [WentOn(replaced=replaced)]

    def goes_on(self) -> None:
        """The ranks of `again` have begun to join: what they hold of the step is in memory."""
        assert self.again is not None
        reached = max((fault.step for fault in self.faults), default=self.again.step)
        self.outcome.ending, self.outcome.step = "in_place", self.again.step
        self.outcome.lost = max(0, reached - self.again.step)

    def renew(self) -> None:
        """What has become of the fault is on record: the next one is another."""
        self.faults, self.outcome = KnownFaults(), Outcome()
        self._asked, self._patient_until = False, math.inf
        self._kept.clear()

    def tick(self, now: float, at_ns: int, stopped: frozenset[int]) -> list[Action]:
        """Enforce the only deadline of this machine: the leader must start to save."""
        if self.state == "over":  # a rank that still hangs was released but cannot receive the message
            return self._kill_silent(now, stopped)
        if self.leading:
            return super().tick(now, at_ns, stopped)
        if self.state != "running":
            return self._take_over(now) if now >= self._patient_until and not self._asked else []
        hung = self.progress.hung(now, stopped)
        return self._hang(hung, at_ns, now) if hung else []

    def _kill_silent(self, now: float, stopped: frozenset[int]) -> list[Action]:
        left = [self.members[rank] for rank in sorted(self.progress.silent(now, stopped) & self._here)]
        for member in left:
            member.hung = True
            self._out(member.rank)
        return [Kill(rank=member.rank) for member in left]

    def _handling(self) -> dict[type, Handler]:
        all_of_them = super()._handling() | {m.Consult: self._on_consult, m.Ended: self._on_ended}
        all_of_them |= {m.Resize: self._on_resize}
        if self.leading:
            return all_of_them
        keep = (m.Regroup, m.Begin, m.Status, m.Report, m.Goodbye, m.Consult, m.Ended, m.Resize)
        mine = {kind: handler for kind, handler in all_of_them.items() if kind in keep}
        return mine | {m.SaveFailed: self._on_leaders_save_failed}

    def _fault(self, fault: Fault, now: float) -> list[Action]:
        if self.leading:
            return super()._fault(fault, now)
        if self.state == "over" or not self.faults.remember(fault) or self.state != "running":
            return []
        self.state = "preparing"
        self._begun_again.clear()
        self._patient_until = math.inf if self.leader == IN_MINDX else now + PATIENCE
        return [RecordPhase(phase="detected")]

    def _take_over(self, now: float) -> list[Action]:
        """Take the lead with the known faults, as if they had just happened."""
        self.leading, self.state, self.again = True, "running", None
        self._handlers = self._handling()
        faults, self.faults = self.faults, KnownFaults()
        actions = [action for fault in faults for action in super(Observer, self)._fault(fault, now)]
        return [action for action in actions if action != RecordPhase(phase="detected")]

    def _hang(self, ranks: frozenset[int], at_ns: int, now: float) -> list[Action]:
        actions = super()._hang(ranks, at_ns, now)
        return actions + [Kill(rank=rank) for rank in sorted(ranks) if self.members[rank].hung]

    def _must_be_killed(self, member: Member) -> bool:
        """No rank is asked to prepare while another backend leads, so a missing answer means nothing."""
        if self.leading:
            return super()._must_be_killed(member)
        return member.hung and not member.gone

    def _after_loss(self, rank: int, now: float) -> list[Action]:
        if self.leading:
            return super()._after_loss(rank, now)
        if self.state == "over" or not self.faults or self._here:
            return []
        return self._end("gave_up", f"{self.leader} ended all ranks and no checkpoint was published")

    def _on_consult(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Consult)
        if message.saved is not None:
            self._kept[member.rank] = message.saved
        parts = {rank: kept.part for rank, kept in sorted(self._kept.items()) if kept.plan == message.step}
        aux, remarks = auxiliary_states(message.step, self.members, self.buffers)
        answer = Send(rank=member.rank, message=m.Consulted(step=message.step, aux=aux, parts=parts))
        # Without a fault it is asked for a repair in place, which needs no record and nobody's patience.
        saves = self.state != "running"
        phases: list[Action] = [RecordPhase(phase="agreed")] if saves and not self._asked else []
        self._asked = self._asked or saves
        return [*phases, answer, *remarks]

    def _on_resize(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        """All that go on say so before any of them joins again; who is not among them does not."""
        assert isinstance(message, m.Resize)
        order, phases = message.order(self.world_size), list[Action]()
        why = self._cannot_go_on_as(order, member.rank)
        if not why:
            if NEW in order.members and self.again is None:  # no fault has opened the record
                phases = [RecordPhase(phase="detected"), RecordPhase(phase="agreed")]
            self.again = order
        return [*phases, Send(rank=member.rank, message=m.ResizeNoted(incarnation=message.incarnation, why=why))]

    def _cannot_go_on_as(self, order: Again, rank: int) -> str:
        if self.leading or self.state == "over":
            return f"{self.leader} does not lead any more"
        if self.again is not None and self.again.incarnation == order.incarnation and self.again != order:
            other = f"{self.again.members} from step {self.again.step}"
            return f"others go on as ranks {other}, not as {order.members} from step {order.step}"
        stay = tuple(one for one in order.members if one != NEW)
        if NEW in order.members:
            if self.faults or stay != tuple(range(self.world_size)):
                return f"ranks are not taken in with a fault under way, or without the others: {order.members}"
        elif not self.faults or stay != tuple(sorted(set(stay))) or rank not in stay:
            return f"it is not known why ranks {order.members} should go on alone"
        missing = set(stay) - self._here
        return f"ranks {sorted(missing)} are not there" if missing else ""

    def _on_leaders_save_failed(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        """The leader gives up after a failed save; another holder may succeed."""
        assert isinstance(message, m.SaveFailed)
        member.failed, member.failures = message.why, member.failures + 1
        return self._take_over(now) if self.faults else []

    def _on_ended(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Ended)
        if self.state == "over":
            return []
        if message.ending != "saved":
            return [] if self.leading else self._take_over(now)
        self.again = None
        out, kept = self.outcome, {r: s for r, s in self._kept.items() if s.plan == message.step}
        reached = max((other.step for other in self.members.values()), default=0)
        out.step, out.path, out.savers = message.step, message.path, tuple(kept)
        out.nbytes, out.lost = sum(saved.nbytes for saved in kept.values()), max(0, reached - message.step)
        out.first_byte_ns = min((s.first_byte_ns for s in kept.values() if s.first_byte_ns), default=None)
        out.unused = tuple(
            Unused(rank=rank, why=self._why_not(other)) for rank, other in self.members.items() if rank not in kept
        )
        return [RecordPhase(phase="saved"), RecordPhase(phase="committed"), *self._end("saved", message.reason)]

    def _why_not(self, member: Member) -> str:
        if member.gone or member.left or member.hung:
            return why_unusable(member)
        return f"not chosen by {self.leader}"
