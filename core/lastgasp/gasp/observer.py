"""The machine of a job whose recoveries somebody else leads (MindIO): it keeps, records, releases, and orders nothing.

What MindIO lacks is added here: the small state of dead ranks, what savers pass to the rank that publishes, the
incident record, a word to all ranks how the recovery ended, and the end of ranks that hang (MindIO notices only
processes that are gone, facts/mindio_tft.md §7.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lastgasp.events import Fault, Unused

from . import messages as m
from .machine import Action, Kill, Machine, Member, Note, Send


@dataclass
class Observer(Machine):
    """As the machine, for one generation that `leader` leads. Hold no reference to the machine that it follows."""

    leader: str = ""
    _kept: dict[int, m.Saved] = field(default_factory=dict)

    @classmethod
    def following(cls, machine: Machine, leader: str) -> Observer:
        """Take over from `machine`, which has given no order yet."""
        return cls(
            replicas=machine.replicas,
            world_size=machine.world_size,
            finish_timeout=machine.finish_timeout,
            save_timeout=machine.save_timeout,
            progress=machine.progress,
            members=machine.members,
            leader=leader,
        )

    def joined(self, rank: int, now: float) -> list[Action]:
        """A rank proved itself; also one that the leader has started anew in the middle of the job."""
        self.members[rank] = Member(rank=rank)
        self.progress.joined(rank, now)
        return [self._release_to(rank)] if self.state == "over" else []

    def tick(self, now: float, at_ns: int, stopped: frozenset[int]) -> list[Action]:
        """Only hangs are looked for: every other deadline is the leader's."""
        if self.state == "over":  # who still hangs was told to leave, and cannot hear it
            silent = [self.members[rank] for rank in sorted(self.progress.silent(now, stopped))]
            left = [member for member in silent if member.here]
            for member in left:
                member.hung = True
            return [Kill(rank=member.rank) for member in left]
        if self.state != "running":
            return []
        hung = self.progress.hung(now, stopped)
        return self._hang(hung, at_ns, now) if hung else []

    def _handlers(self) -> dict[type, Callable[[Member, m.FromRank, float], list[Action]]]:
        keep = (m.Begin, m.Status, m.Report, m.Goodbye)
        mine = {kind: handler for kind, handler in super()._handlers().items() if kind in keep}
        return mine | {m.Consult: self._on_consult, m.Ended: self._on_ended}

    def _fault(self, fault: Fault, now: float) -> list[Action]:
        if self.state == "over" or any(f.rank == fault.rank and f.kind == fault.kind for f in self.faults):
            return []
        self.faults.append(fault)
        if self.state == "running":
            self.state, self.recovery = "preparing", self.recovery + 1
            return [Note(phase="detected")]
        return []

    def _hang(self, ranks: frozenset[int], at_ns: int, now: float) -> list[Action]:
        actions = super()._hang(ranks, at_ns, now)
        return actions + [Kill(rank=rank) for rank in sorted(ranks) if self.members[rank].hung]

    @staticmethod
    def _must_be_killed(member: Member) -> bool:
        """Nobody is asked to prepare here, so an answer that is missing tells nothing."""
        return member.hung and not member.gone

    def _after_loss(self, rank: int, now: float) -> list[Action]:
        if self.state == "over" or not self.faults or any(member.here for member in self.members.values()):
            return []
        return self._end("gave_up", f"{self.leader} ended all ranks and no checkpoint was published")

    def _on_consult(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Consult)
        first = not self._kept
        if message.saved is not None:
            self._kept[member.rank] = message.saved
        parts = {rank: kept.part for rank, kept in sorted(self._kept.items()) if kept.plan == message.step}
        answer = Send(rank=member.rank, message=m.Consulted(step=message.step, small={}, parts=parts))
        notes: list[Action] = [Note(phase="agreed")] if message.saved is None and first else []
        return [*notes, answer]

    def _on_ended(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Ended)
        if self.state == "over":
            return []
        out, kept = self.outcome, {r: s for r, s in self._kept.items() if s.plan == message.step}
        reached = max((other.step for other in self.members.values()), default=0)
        durable = max((other.durable for other in self.members.values()), default=0)
        out.step, out.path, out.savers = message.step, message.path, tuple(kept)
        if message.ending != "saved":
            out.step, out.lost = None, max(0, reached - durable)
            return self._end(message.ending, message.reason)
        out.nbytes, out.lost = sum(saved.nbytes for saved in kept.values()), max(0, reached - message.step)
        out.first_byte_ns = min((s.first_byte_ns for s in kept.values() if s.first_byte_ns), default=None)
        out.unused = tuple(
            Unused(rank=rank, why=self._why_not(other)) for rank, other in self.members.items() if rank not in kept
        )
        return [Note(phase="saved"), Note(phase="committed"), *self._end("saved", message.reason)]

    def _why_not(self, member: Member) -> str:
        if member.gone or member.left or member.hung:
            return self._why(member)
        return f"not chosen by {self.leader}"
