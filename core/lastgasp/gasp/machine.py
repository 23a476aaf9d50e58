"""One attempt of a job as a state machine: events in, actions out. No socket, clock, thread or file.

Its orders are sent as they are: what dead ranks have recorded it reads through a port, `auxiliary.RankBuffers`.

running --fault--> preparing --all answered--> saving --all saved--> committing --> over

One recovery runs at a time. Orders carry the numbers of their recovery and plan; answers to an older one are
dropped, so orders and answers may be repeated or late. A second fault while saving leads to a new plan with the
remaining holders.

Jobs may have many ranks: handling one message takes constant time, and only the start of a recovery and a plan look
at all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from lastgasp.events import Ending, Fault, FaultKind
from lastgasp.replicas import is_split_of
from lastgasp.topology import ReplicaGroups

from . import messages as m
from .actions import Action, Kill, RecordPhase, Send
from .arena_decision import ArenaLook, arenas_held, decide_with_arenas, from_live_ranks
from .auxiliary import NoBuffers, RankBuffers
from .current_save import CurrentSave
from .decision import Decision, GiveUp, NothingToSave
from .known_faults import KnownFaults
from .members import Member, Outcome
from .orders import save_orders
from .progress import Progress
from .views import SAVE_TRIES, meeting_step, named, nothing_new, safe_step, views_of

MARGIN = 2.0
"""Seconds of grace for messages, on top of a rank's own limit."""

GO_ON_TRIES = 3
"""How often in one recovery the target step is raised; a held rank cannot start a step beyond it."""

State = Literal["running", "preparing", "saving", "committing", "over"]

Handler = Callable[[Member, m.FromRank, float], list[Action]]


@dataclass
class Machine:
    """The controller's state machine for one attempt of a job.

    Args:
        replicas: holders of each shard.
        world_size: number of expected ranks.
        finish_timeout, save_timeout: seconds for a rank to leave its update, for a save to be written.
        progress: the hang watchdog.
        buffers: what the ranks have recorded.
        arenas: what is known of the ranks' arenas; None where nobody keeps any.
    """

    replicas: ReplicaGroups
    world_size: int
    finish_timeout: float
    save_timeout: float
    progress: Progress
    buffers: RankBuffers = field(default_factory=NoBuffers)
    arenas: ArenaLook | None = None
    state: State = "running"
    recovery: int = 0
    plan: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    faults: KnownFaults = field(default_factory=KnownFaults)
    outcome: Outcome = field(default_factory=Outcome)
    unlike: str = ""
    """Why some ranks are not the replicas that they should be; empty if all are."""
    reach: int = -1
    """The step that ranks stopped before it were ordered to complete."""
    _asked_again: int = 0
    _deadline: float = 0.0
    _current: CurrentSave | None = None
    _damaged: set[tuple[int, int, bool]] = field(default_factory=set)
    """Rank and step of damaged arenas, and whether it is the copy on a partner host."""
    _here: set[int] = field(default_factory=set)
    """Ranks that are connected and can answer."""
    _awaited: set[int] = field(default_factory=set)
    """Those that have not yet answered the last Prepare."""
    _handlers: dict[type, Handler] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    """Ranks that will never join another gather, and why; of those that said goodbye, whose process has ended."""

    def __post_init__(self) -> None:
        self._handlers = self._handling()

    # -- events -----------------------------------------------------------------------------------

    def joined(self, rank: int, now: float, pid: int = 0) -> list[Action]:
        """A rank has authenticated. `pid`: its process, if that is on the controller's host."""
        self._admit(rank, now, pid)
        if self.state == "over":
            return [Send(rank=rank, message=self.outcome.release(self.recovery))]
        if self.state == "running":
            return []
        if self.state == "preparing":
            self._awaited.add(rank)
        return [Send(rank=rank, message=self._prepare_order())]  # the next plan may need it as a holder

    def _admit(self, rank: int, now: float, pid: int) -> None:
        self.members[rank] = Member(rank=rank, pid=pid)
        self._here.add(rank)
        self.lost.pop(rank, None)
        self.progress.joined(rank, now)

    def _out(self, rank: int) -> None:
        """The rank can no longer be asked."""
        self._here.discard(rank)
        self._awaited.discard(rank)

    def died_at(self, rank: int, step: int) -> bool:
        """Record that a dead rank had completed `step`, according to its crash-safe buffer; False if that was known."""
        member = self.members.get(rank)
        if member is None or step <= member.step:
            return False
        member.step = step
        self.faults.completed(rank, step)
        return True

    def gone(self, rank: int, evidence: str, kind: FaultKind, at_ns: int, now: float) -> list[Action]:
        """The rank's process or connection ended; after a Goodbye that is not a fault."""
        self.died_at(rank, self.buffers.newest(rank))
        member = self.members.setdefault(rank, Member(rank=rank))
        if member.left or member.gone:
            return []
        member.gone = evidence
        self.lost[rank] = f"is gone: {evidence}"
        self._out(rank)
        self.progress.left(rank)
        if self.state == "over":
            return []
        told = member.fault is not None and member.fault.step < 0 and member.fault.kind == "exception"
        if told:  # it ended because of what it raised during start-up
            return self._after_loss(rank, now)
        fault = Fault(kind=kind, rank=rank, cause=evidence, step=member.step, seen_ns=at_ns)
        return self._fault(fault, now) + self._after_loss(rank, now)

    def said(self, rank: int, message: m.FromRank, now: float) -> list[Action]:
        """Handle a message of a rank."""
        member = self.members.get(rank)
        if member is None or member.gone:
            return []
        handler = self._handlers.get(type(message))
        return handler(member, message, now) if handler else []

    def tick(self, now: float, at_ns: int, stopped: frozenset[int]) -> list[Action]:
        """Handle the passing of time. `stopped`: ranks whose process is currently stopped (SIGSTOP)."""
        if self.state == "running":
            hung = self.progress.hung(now, stopped)
            return self._hang(hung, at_ns, now) if hung else []
        if self.state == "over":
            return []
        if now >= self._deadline:
            return self._deadline_passed(now)
        if self.state == "preparing":  # not everything that is waited for comes with an event
            return self._decide_if_ready(now)
        return self._save_orders() + self._hung_savers(now, stopped)

    # -- messages of ranks ------------------------------------------------------------------------

    def _handling(self) -> dict[type, Handler]:
        return {
            m.Regroup: self._on_regroup,
            m.Begin: self._on_begin,
            m.Status: self._on_status,
            m.Report: self._on_report,
            m.Entered: self._on_entered,
            m.Prepared: self._on_prepared,
            m.Saved: self._on_saved,
            m.SaveFailed: self._on_save_failed,
            m.Committed: self._on_committed,
            m.Goodbye: self._on_goodbye,
        }

    def _on_regroup(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Regroup)
        if is_split_of(message.replicas, self.replicas):
            self.replicas, self.unlike = message.replicas, message.why
        return []

    def _on_begin(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Begin)
        member.begins(message)
        return []

    def _on_status(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Status)
        member.reached(message.step, message.durable)
        self.progress.heard(member.rank, message, now)
        return []

    def _on_report(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Report)
        stop = message.fault.kind == "sigterm"
        if message.fault.kind != "peer" and not (stop and member.fault):  # a stop says nothing about the rank
            member.fault = message.fault
            if not stop:
                self.lost.setdefault(member.rank, f"has stopped: {message.fault.cause}")
        return self._fault(message.fault, now)

    def _on_entered(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        """The rank may be in a collective with ranks that have stopped before that step: let all complete it.

        Only while every rank is running: a dead one would never arrive.
        """
        assert isinstance(message, m.Entered)
        current = (message.recovery, "preparing") == (self.recovery, self.state) and self._all_run()
        return self._go_on(message.step, now) if current else []

    def _on_prepared(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Prepared)
        if message.recovery != self.recovery or message.target < self.reach:
            return []  # it crossed a later order, and answers that one as well
        member.prepared = message
        self._awaited.discard(member.rank)
        member.reached(message.step, message.durable)
        if self.state == "preparing":
            return [] if self._awaited else self._decide_if_ready(now)
        return self._prepare_again(member, now) if self._moved(member, message) else []

    def _moved(self, member: Member, message: m.Prepared) -> bool:
        """A saver reports again what it holds: its state has advanced (a compiled graph cannot be stopped)."""
        current = self._current if self.state == "saving" else None
        if current is None or member.rank not in current.unsaved:
            return False
        return not (message.usable and message.step == current.plan.step)

    def _on_saved(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Saved)
        current = self._ordered(member.rank, message.recovery, message.plan)
        if current is None or self.state != "saving":
            return []
        current.take(member.rank, message)
        if current.unsaved:
            return []
        publisher = self.members[current.plan.savers[0]]
        self.state, self._deadline = "committing", now + publisher.to_commit(self.finish_timeout, self.save_timeout)
        order = m.Commit(recovery=self.recovery, plan=self.plan, parts=current.parts)
        return [RecordPhase(phase="saved"), Send(rank=publisher.rank, message=order)]

    def _on_save_failed(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.SaveFailed)
        current = self._ordered(member.rank, message.recovery, message.plan)
        if current is None or self.state == "over":
            return []
        if message.arena >= 0:
            self._damaged.add(current.plan.damaged(message.arena))
        else:
            member.failed, member.failures = message.why, member.failures + 1
        return self._plan_again(now)

    def _on_committed(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Committed)
        current = self._ordered(member.rank, message.recovery, message.plan)
        if current is None or self.state != "committing":
            return []
        saved = current.saved[member.rank]
        self.outcome.path, self.outcome.first_byte_ns = saved.path, saved.first_byte_ns
        self.outcome.nbytes = current.nbytes
        return [RecordPhase(phase="committed"), *self._end("saved", "")]

    def _on_goodbye(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        if member.left:
            return []
        member.left = True
        self._out(member.rank)
        self.progress.left(member.rank)
        return self._after_loss(member.rank, now)

    # -- the recovery -----------------------------------------------------------------------------

    def _fault(self, fault: Fault, now: float) -> list[Action]:
        if self.state == "over" or not self.faults.remember(fault) or self.state != "running":
            return []
        return [RecordPhase(phase="detected"), *self._stop_all(now), *self._decide_if_ready(now)]

    def _stop_all(self, now: float) -> list[Action]:
        """Have all ranks stop at the end of their step, and say what they hold."""
        self.state, self.recovery = "preparing", self.recovery + 1
        # A rank reports on its own when its update does not end in time; MARGIN allows for latency.
        self._deadline = now + self.finish_timeout + MARGIN
        self._awaited = {rank for rank in self._here if self.members[rank].prepared is None}
        return self._ask(self._here)

    def _ask(self, ranks: Iterable[int]) -> list[Action]:
        order = self._prepare_order()
        return [Send(rank=rank, message=order) for rank in ranks]

    def _prepare_order(self) -> m.Prepare:
        target = max([self.reach, *map(self.buffers.newest, self.members)])
        return m.Prepare(recovery=self.recovery, faults=named(self.faults), target=target)

    def _all_run(self) -> bool:
        return self.faults.only_stops and len(self._here) >= self.world_size

    def _go_on(self, step: int, now: float) -> list[Action]:
        """Ask all ranks again, and let those stopped before `step` complete it; a few times at most."""
        if step <= self.reach or self._asked_again >= GO_ON_TRIES:
            return []
        self.reach, self._asked_again = step, self._asked_again + 1
        self._deadline = now + self.finish_timeout + MARGIN
        for rank in self._here:
            member = self.members[rank]
            if member.prepared is not None and member.prepared.step < step:
                member.prepared = None
                self._awaited.add(rank)
        return self._ask(self._here)

    def _hang(self, ranks: frozenset[int], at_ns: int, now: float) -> list[Action]:
        # Where all ranks wait for each other none is to blame, and all can still save.
        for rank in ranks if ranks < self._here else ():
            self.members[rank].hung = True
            self._out(rank)
        actions: list[Action] = []
        for rank in sorted(ranks):
            cause = self.progress.describe(rank, now)
            step = self.members[rank].step
            fault = Fault(kind="hang", rank=rank, cause=cause, step=step, seen_ns=at_ns)
            actions += self._fault(fault, now)
        return actions

    def _decide_if_ready(self, now: float) -> list[Action]:
        if self.state != "preparing" or self._awaited or (self.arenas is not None and self.arenas.awaited):
            return []
        decision = self._decide()
        # One live rank would do for the save; but where all run, each can have its own random state at that step.
        if (self._all_run() or not from_live_ranks(decision)) and (again := self._meet(now)):
            return again
        return [RecordPhase(phase="agreed"), *self._carry_out(decision, now)]

    def _meet(self, now: float) -> list[Action]:
        """All shards have holders that stopped on both sides of an update: those behind may still complete it."""
        step = meeting_step(self.members, self.replicas)
        return [] if step is None else self._go_on(step, now)

    def _decide(self) -> Decision:
        for rank in [rank for rank, member in self.members.items() if member.prepared is None]:
            self.died_at(rank, self.buffers.newest(rank))  # its last heartbeat may be older
        views = views_of(self.members, self.world_size)
        durable = max((member.durable for member in self.members.values()), default=0)
        arenas = arenas_held(self.arenas, self.members, self._damaged)
        return decide_with_arenas(views, self.replicas, durable, arenas)

    def _carry_out(self, decision: Decision, now: float) -> list[Action]:
        self.outcome.unused = decision.unused
        if isinstance(decision, NothingToSave):
            begun = any(member.begun for member in self.members.values())
            self.outcome.step, self.outcome.lost = safe_step(decision.step, begun), 0
            return self._end("nothing_to_save", nothing_new(decision.step, begun))
        if isinstance(decision, GiveUp):
            self.outcome.lost = decision.lost
            return self._end("gave_up", decision.reason)
        self.state, self.plan, self._current = "saving", self.plan + 1, CurrentSave(decision)
        self._deadline = now + self.save_timeout
        self.outcome.planned(decision)
        return self._save_orders()

    def _save_orders(self) -> list[Action]:
        """Order the save, once all hosts have reported what their dead ranks recorded, or can no longer."""
        current = self._current
        if current is None or current.told or self.buffers.awaited:
            return []
        current.told, plan = True, current.plan
        return save_orders((self.recovery, self.plan), plan, self.faults, self.members, self.buffers, self.arenas)

    def _ordered(self, rank: int, recovery: int, plan: int) -> CurrentSave | None:
        """The current save, if this is a rank's answer to an order of it."""
        current, same = self._current, (recovery, plan) == (self.recovery, self.plan)
        return current if same and current is not None and rank in current.savers else None

    @property
    def _savers(self) -> frozenset[int]:
        """Of the current plan."""
        return self._current.savers if self._current is not None else frozenset()

    def _after_loss(self, rank: int, now: float) -> list[Action]:
        """A rank was lost during a recovery: continue without it."""
        if self.state == "preparing":
            return self._decide_if_ready(now)
        if self.state in ("saving", "committing") and rank in self._savers:
            return self._plan_again(now)
        return []

    def _plan_again(self, now: float) -> list[Action]:
        return self._call_off() + self._carry_out(self._decide(), now)

    def _call_off(self) -> list[Action]:
        assert self._current is not None
        void = m.Discard(recovery=self.recovery, plan=self.plan)
        savers, self._current = dict.fromkeys(self._current.plan.savers), None
        return [Send(rank=rank, message=void) for rank in savers if self.members[rank].here]

    def _prepare_again(self, mover: Member, now: float) -> list[Action]:
        """The others may have advanced too: ask them, then plan with what they hold now."""
        mover.moves += 1
        if mover.moves >= SAVE_TRIES:  # with a closed gate a state can advance only once; this one cannot be trusted
            mover.failed, mover.failures = "it completed another step twice", SAVE_TRIES
            return self._plan_again(now)
        actions = self._call_off()
        self.state, self.plan = "preparing", self.plan + 1
        self._deadline = now + self.finish_timeout + MARGIN
        self._awaited = self._here - {mover.rank}
        for rank in self._awaited:
            self.members[rank].prepared = None
        return actions + self._ask(self._awaited) + self._decide_if_ready(now)

    def _hung_savers(self, now: float, stopped: frozenset[int]) -> list[Action]:
        """Drop savers without heartbeats (stopped, or their host is lost): they will not finish their save."""
        silent = self.progress.silent(now, stopped)
        hung = silent & self._savers & self._here
        if not hung:
            return []
        for rank in hung:
            self.members[rank].hung = True
            self._out(rank)
        return self._plan_again(now)

    def _deadline_passed(self, now: float) -> list[Action]:
        if self.state == "preparing":
            return [RecordPhase(phase="agreed"), *self._carry_out(self._decide(), now)]
        assert self._current is not None
        saving = self.state == "saving"
        late = self._current.unsaved if saving else {self._current.plan.savers[0]}
        for rank in late:
            member = self.members[rank]
            limit = self.save_timeout if saving else member.to_commit(self.finish_timeout, self.save_timeout)
            member.failed, member.failures = f"not {'written' if saving else 'published'} in {limit:g} s", SAVE_TRIES
        return self._plan_again(now)

    def _end(self, ending: Ending, reason: str) -> list[Action]:
        self.state, self.outcome.ending, self.outcome.reason = "over", ending, reason
        order = self.outcome.release(self.recovery)
        releases = [Send(rank=rank, message=order) for rank in self._here]
        kills = [Kill(rank=rank) for rank, member in self.members.items() if self._must_be_killed(member)]
        return [RecordPhase(phase="released"), *releases, *kills]

    def _must_be_killed(self, member: Member) -> bool:
        return member.must_be_killed
