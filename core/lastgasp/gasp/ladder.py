"""The state machine of an attempt whose ranks may enter their training again: the rungs above save and restart.

When all survivors have answered, it chooses between those rungs and the save. Where the recovery goes on in place this
machine is over, and the next incarnation has a machine of its own. Survivors join that one with the step that they hold
in memory, so another fault at any moment of the recovery is an ordinary fault there: that step is saved. Where ranks
are late, the others enter once more with new processes for them. Ranks that begin with files (`Begin.from_files`) are
entered again once the step has been saved.

Where ranks are missing and new processes wait to take their places (`Offer.grow`), all ranks are stopped at the end of
a step without a fault. If then anything is in the way, or one does not come to the end of its step, they train on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from lastgasp.events import Ending, Fault

from . import fewer_ranks
from . import messages as m
from .actions import Action, AgreedAnew, Kill, RecordPhase, Remark, Send
from .again import NEW, Again
from .arena_decision import arenas_held
from .auxiliary import auxiliary_states
from .decision import Decision, SavePlan
from .ladder_state import LadderState
from .late import LATE, NOT_REPLACED, REPLACED, also_lost, holders_of, late_ranks
from .machine import MARGIN
from .members import Member, Outcome
from .own_parts import BACK, arenas_to_take, states_to_hand, step_of

AGAIN = 60.0
"""Seconds until ranks are stopped once more to take in those that wait: one did not answer in time."""
BUSY = 30.0
"""Seconds, besides `finish_timeout`, in which all ranks must come to the end of their step, where steps are short."""
CAUSE = 2.0
"""Seconds until it is known how a process has ended that has not joined: on another host it takes a message more."""
STOPPED = 10.0
"""Seconds, besides `finish_timeout`, that a stopped process is waited for where all begin again with files. A minute at
least the others wait for its new process (`from_files.JOIN`), or twice as long as that takes."""
OFFER = 2.0
"""Seconds that a launcher has to say what it can do; it looks at its ranks ten times a second."""


@dataclass
class Ladder(LadderState):
    """The machine of one incarnation of an attempt."""

    def _on_begin(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Begin)
        if message.together and not message.entered:  # it hands its state over itself, which takes as long as a save
            self.enter_by = max(self.enter_by, now + self.finish_timeout + self.save_timeout)
        self._recovery[member.rank] = message.recovery
        self._from_files = self._from_files or message.from_files
        self.began_at = max(self.began_at, message.step)
        if message.entered:
            self._entered.add(member.rank)
        self._fewer[member.rank] = message.fewer
        actions = super()._on_begin(member, message, now)
        if self.state != "preparing" or not self.holders:
            return actions
        member.prepared = None  # it has answered before it had its step
        self._awaited.add(member.rank)
        return actions + self._ask([member.rank])

    def _on_prepared(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Prepared)
        if self.state == "running":  # what it was asked for was called off
            return []
        crossed = bool(self.holders) and member.begun and message.step < self.began_at
        return [] if crossed else super()._on_prepared(member, message, now)

    def _on_report(self, member: Member, message: m.FromRank, now: float) -> list[Action]:
        assert isinstance(message, m.Report)
        if not message.passing and message.fault.kind != "peer":
            self._stubborn.add(member.rank)
        return super()._on_report(member, message, now) + self._stays(message.fault)

    def tick(self, now: float, at_ns: int, stopped: frozenset[int]) -> list[Action]:
        """As the machine's; and a rank that does not enter in time is a fault. Ranks that wait are taken in."""
        if self.state == "running" and (waiting := self._waiting(now)):
            self._growing = waiting
            self._grow_by = now + self.finish_timeout + min(max(BUSY, 2 * self.progress.step_takes), self.save_timeout)
            return self._stop_all(now)
        if self.state == "over":
            return self._stopped_before_entering(now, at_ns, stopped)
        if stuck := self._stuck(now, stopped):
            return self._hang(stuck, at_ns, now)
        if self._growing and (hung := self.progress.hung(now, stopped)):
            return self._train_on(now) + self._hang(hung, at_ns, now)
        waits = self.enter_by < math.inf and not self._late and len(self.members) < self.world_size  # for others
        actions = [] if waits and self.state == "running" else super().tick(now, at_ns, stopped)
        if self.state != "running" or now < self.enter_by or self._late:
            return actions
        self._late = True
        for rank in late_ranks(self.world_size, self._entered, self.members, self.holders):
            actions += self._fault(Fault(kind="hang", rank=rank, cause=LATE, step=self.began_at, seen_ns=at_ns), now)
        return actions

    def _stuck(self, now: float, stopped: frozenset[int]) -> frozenset[int]:
        """Ranks that are not slow to load what all begin with, but stand still."""
        if self.state != "running" or not self.loads or len(self._entered) >= self.world_size:
            return frozenset()
        still = self.progress.standing_still(now, stopped, self.finish_timeout + STOPPED) | self.absent(now)
        return (still & self._here) - self._entered

    def _stopped_before_entering(self, now: float, at_ns: int, stopped: frozenset[int]) -> list[Action]:
        """The same of ranks that have yet to join the next incarnation, as far as they run on the controller's host."""
        if self.again is None or not self.again.from_files or self.progress.was_suspended(now):
            self._stopped_since = {}
            return []
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in stopped}
        actions: list[Action] = []
        for rank, since in self._stopped_since.items():
            if now - since > self.finish_timeout + STOPPED:
                cause = f"its process has been stopped for {now - since:.0f} s"
                actions += self._stays(Fault(kind="hang", rank=rank, cause=cause, step=self.again.step, seen_ns=at_ns))
        return actions

    def _stays(self, fault: Fault) -> list[Action]:
        """A rank says that it does not leave its training, after the order to enter it again."""
        again = also_lost(self.again, fault)
        if again is None or not self.faults.remember(fault):
            return []
        if why := self._forbidden(again.lost) or self._no_process():
            return [Remark(text=NOT_REPLACED.format(rank=fault.rank, why=why))]
        self.again, self.stayed = again, (*self.stayed, fault.rank)
        return [AgreedAnew(), Kill(rank=fault.rank), Remark(text=REPLACED.format(rank=fault.rank))]

    # -- growing ----------------------------------------------------------------------------------

    def _waiting(self, now: float) -> tuple[int, ...]:
        """`Again.members` with those that wait to be taken in; empty where none do, or not yet."""
        grow = self.offer.grow if self.offer is not None else ()
        if not grow or self.not_grown or now < self._grow_after:
            return ()
        ranks = range(self.world_size)
        if [rank for rank in sorted(grow) if rank != NEW] != [*ranks] or len(self._here) < self.world_size:
            return ()
        if not all(rank in self._entered and self.members[rank].step > self.began_at for rank in ranks):
            return ()
        if self._by_handlers and self.offer is not None and len(grow) != self.offer.complete:
            return ()  # they know the complete job alone, and the rest may still come
        if any(said.parts % len(grow) for said in self._fewer.values()):
            return ()  # the same
        caps, one = {self._recovery.get(rank, "") for rank in self._here}, len(self.replicas) == 1
        self.not_grown = fewer_ranks.cannot_grow(caps, self._elastic >= self._here, one, by_handlers=self._by_handlers)
        return () if self.not_grown else grow

    def _grow(self, now: float) -> list[Action]:
        """All have answered: enter again with those that wait, or train on.

        The step is not saved, even where one rank alone holds it: that is no worse than before. But handlers tear down
        what a save would need, so with them it is; and where all begin with files.
        """
        decision = self._decide()
        chosen = self._choose(decision)
        if isinstance(chosen, str):
            self.not_grown = chosen
            return self._train_on(now)
        self._growing = ()
        phases: list[Action] = [RecordPhase(phase="detected"), RecordPhase(phase="agreed")]
        alone = self._from_files or (self._by_handlers and fewer_ranks.fewest(self.replicas, chosen.takers) < 2)
        if alone and isinstance(decision, SavePlan):
            self._once_saved = msgspec.structs.replace(chosen, saved=True)
            return phases + super()._carry_out(decision, now)
        return phases + self._enter_again(chosen, 0)

    def _train_on(self, now: float = 0.0) -> list[Action]:
        """What the ranks were stopped for is not to be, or not yet."""
        self._growing, self._grow_after, self.state, self.reach, self._asked_again = (), now + AGAIN, "running", -1, 0
        self._awaited, self.plan, self.outcome = set(), 0, Outcome()
        for member in self.members.values():
            member.prepared, member.failed, member.failures = None, "", 0
        order = m.Prepare(recovery=self.recovery, faults=(), target=m.CALLED_OFF)
        return [Send(rank=rank, message=order) for rank in self._here]

    def _fault(self, fault: Fault, now: float) -> list[Action]:
        growing, self._growing = self._growing, ()
        actions = super()._fault(fault, now)
        if not growing or self.state != "preparing":
            return actions
        self._awaited, self._deadline = set(self._here), now + self.finish_timeout + MARGIN
        for rank in self._here:
            self.members[rank].prepared = None
        return [RecordPhase(phase="detected"), *actions, *self._ask(self._here), *self._decide_if_ready(now)]

    # -- a decision -------------------------------------------------------------------------------

    def _decide_if_ready(self, now: float) -> list[Action]:
        if self.state == "preparing" and (self._may_come or (self.wanted and self.buffers.awaited)):
            return []  # ranks that are entered again get the dead ranks' states with the order itself
        if self.state == "preparing" and not self._awaited and (self._awaits_offer(now) or self._awaits_cause(now)):
            return []
        if self._growing and self.state == "preparing":
            return [] if self._awaited else self._grow(now)
        return super()._decide_if_ready(now)

    def _deadline_passed(self, now: float) -> list[Action]:
        later = self.enter_by if self._may_come else self._grow_by if self._growing else now
        if self.state == "preparing" and now < later:
            self._deadline = later
            return []
        # That some rank is busy is no fault.
        return self._train_on(now) if self._growing else super()._deadline_passed(now)

    def _awaits_offer(self, now: float) -> bool:
        """A rank failed so soon that the launcher has not looked at it before."""
        if self.offer is not None or not self.wanted or not self.offering():
            return False
        self._offer_by = min(self._offer_by, now + OFFER)
        return now < self._offer_by

    def _awaits_cause(self, now: float) -> bool:
        """Ranks have seen that others are gone, and none is known to be: new processes that have yet to join.

        Their launchers tell how they ended, a little later than collectives do.
        """
        missing = any(rank not in self.members for rank in range(self.world_size))
        if not self.holders or not missing or any(fault.kind != "peer" for fault in self.faults):
            return False
        self._cause_by = min(self._cause_by, now + CAUSE)
        return now < self._cause_by

    def _carry_out(self, decision: Decision, now: float) -> list[Action]:
        if self.plan == 0 and any(self._recovery.values()):
            chosen = self._choose(decision)
            if isinstance(chosen, str):
                self.not_in_place = chosen
            elif not self._only_copy(chosen) or not isinstance(decision, SavePlan):
                return self._enter_again(chosen, step_of(decision, self._in_parts)[1])
            else:  # from files; or the only copy: were that rank to die during the recovery, the step would be gone
                self._once_saved = msgspec.structs.replace(chosen, saved=True)
        return super()._carry_out(decision, now)

    def _end(self, ending: Ending, reason: str) -> list[Action]:
        """As the machine's; but a step that was saved because only one rank holds it is gone on with in place."""
        again, self._once_saved = self._once_saved, None
        failed, whole = ending != "saved", not self.faults and len(self._here) == self.world_size
        if again is not None and failed and whole and self._from_files and NEW in again.members:
            self.not_grown, self.grown = fewer_ranks.NOT_GROWN.format(why=reason), ""
            return [RecordPhase(phase="called_off"), Remark(text=self.not_grown), *self._train_on()]
        if again is None or (failed and (self._from_files or NEW not in again.members)):
            self.shrunk = self.grown = ""
            return super()._end(ending, reason)
        if self._lost_ranks() != again.lost:
            self.shrunk = self.grown = ""
            chosen = self._choose_anew(again)
            if isinstance(chosen, str):
                self.not_in_place = ": ".join(("another rank was lost while the step was saved", chosen)).rstrip(": ")
                return super()._end(ending, reason)
            again = chosen
        if failed:  # without a fault: those that wait are taken in all the same
            self.grown += fewer_ranks.UNSAVED.format(why=reason)
            return self._enter_again(msgspec.structs.replace(again, saved=False), 0)
        return self._enter_again(again, self.outcome.lost or 0)

    def _choose_anew(self, before: Again) -> Again | str:
        """What follows the save if those that were lost during it had been lost before.

        A restart where ranks were to be taken in, where handlers have been told who is lost, and where the step is an
        older one now: who was to write the newer one may have done so before it died.
        """
        if NEW in before.members or self._by_handlers or self._current is None:
            return ""
        if self._current.plan.step != before.step:
            return f"step {self._current.plan.step} is the newest that is left"
        chosen = self._choose(self._current.plan)
        return chosen if isinstance(chosen, str) else msgspec.structs.replace(chosen, saved=True)

    def _choose(self, decision: Decision) -> Again | str:
        """What to do in place, or why that is not possible."""
        step, lost = step_of(decision, self._in_parts)[0], self._lost_ranks()
        if step < 0:
            return "no rank holds a common step"
        if self._in_parts:
            return self._choose_parts(step, lost)
        holders = [] if self._from_files else holders_of(step, self._here, self.members, alike=len(self.replicas) == 1)
        takers = tuple(rank for rank in range(self.world_size) if rank not in holders)
        if why := self._forbidden(lost) or self._impossible(step, lost, holders):
            return why
        assert self.offer is not None
        members = self._growing
        if members:
            if lost:
                return f"{fewer_ranks.named(lost)} did not answer"
            self.grown = fewer_ranks.GROWN.format(new=members.count(NEW), all=len(members))
        elif lost and (why := self._no_process()):
            members = tuple(rank for rank in range(self.world_size) if rank not in lost)
            if step <= self.began_at or not (self.offer.least or (self._by_handlers and self._elastic >= self._here)):
                return why
            if cannot := self._cannot_shrink(members, takers):
                return f"{why}; the job cannot go on with fewer ranks: {cannot}"
            self.shrunk = fewer_ranks.shrunk(lost, why, len(members), self.world_size)
        source = min(holders, key=lambda rank: (self.members[rank].fault is not None, rank), default=-1)
        return Again(
            incarnation=self.incarnation + 1, step=step, source=source, takers=takers, lost=lost,
            port=self.offer.port, host=self.offer.host, members=members,
        )  # fmt: skip

    def _choose_parts(self, step: int, lost: tuple[int, ...]) -> Again | str:
        """The same where each rank begins with its own part of `step`, a new process with that of the dead one."""
        stay = [rank for rank in range(self.world_size) if rank not in lost]
        if why := self._forbidden(lost) or self._impossible(step, lost, stay):
            return why
        assert self.offer is not None and self.arenas is not None
        if lost and (why := self._no_process()):
            return why
        held = arenas_held(self.arenas, self.members, self._damaged)
        found = arenas_to_take(step, lost, self.members, held, self.arenas, self.replicas)
        if isinstance(found, str):
            return found
        return Again(
            incarnation=self.incarnation + 1, step=step, source=stay[0], takers=lost, lost=lost,
            port=self.offer.port, host=self.offer.host, arenas=found,
        )  # fmt: skip

    def _only_copy(self, again: Again) -> bool:
        """Whether a holder is left without another one of its shard. An arena outlives its rank."""
        if again.arenas is not None:
            return False
        if len(self.replicas) == 1 or self._from_files:
            return len(again.takers) >= self.world_size - 1
        return bool(again.takers) and fewer_ranks.fewest(self.replicas, again.takers) < 2

    def _forbidden(self, lost: tuple[int, ...]) -> str:
        """Why such a fault is not answered in place."""
        caps = {self._recovery.get(rank, "") for rank in self._here or self._recovery}
        cap = min(caps, default="")
        if "" in caps or len(caps) > 1:
            return "not every rank can be entered again"
        if cap in ("restart", "save"):
            return f"recovery={cap}"
        if self._by_handlers and self.offer and self.world_size < self.offer.complete and not self._growing:
            return fewer_ranks.FEWER
        if lost and cap in ("retry", "fewer") and not (self._by_handlers and self._elastic >= self._here):
            return f"recovery={cap}: no rank is replaced"
        if lost and cap == "later":
            return "it is not the first training of its script: no rank is replaced"
        if self.unwise:
            return self.unwise
        causes = [fault for fault in self.faults if fault.kind != "peer"]
        others = [fault for fault in causes if fault.rank not in lost or fault.kind not in ("killed", "hang", "lost")]
        for fault in others:
            if fault.kind != "exception" or fault.rank in self._stubborn or fault.rank in lost:
                return f"a fault of that kind is not answered in place ({fault.kind} on rank {fault.rank})"
        if others and self.weary:
            return self.weary
        tried = bool(others) or not (lost or self._growing)
        return f"recovery={cap}: no step is tried again" if cap in ("replace", "fewer") and tried else ""

    def _impossible(self, step: int, lost: tuple[int, ...], holders: list[int]) -> str:
        """Why it cannot be done now."""
        left = [rank for rank, member in self.members.items() if member.left]
        if left:
            return f"rank {left[0]} had finished its training"
        if step <= self.began_at and not self._once_more:
            again = ", when the fault before was answered in place" if self.holders or self._entered else ""
            return f"no step was completed since training began{again}"
        if not holders and not self._from_files:
            return f"no rank holds step {step} in memory"
        in_one = len(self.replicas) == 1 or self._from_files or self._in_parts
        if len(holders) < self.world_size and not in_one:
            if not all(self.members[rank].together for rank in holders):
                return "the ranks do not all hold the same state"
            if not all(set(shard) & set(holders) for shard in self.replicas):
                return f"not every shard of step {step} is held in memory"
        asked = sorted(self._here) if self._from_files else holders
        for rank in asked:
            if (found := self.members[rank].prepared) is not None and found.usable and found.why:
                return f"rank {rank}: {found.why}"
        if self.offer is None and self.offering():
            return "the job's launcher has not said in time whether it can do it"
        return "the job's launcher cannot do it (it is none of lastgasp)" if self.offer is None else ""

    def _cannot_shrink(self, members: tuple[int, ...], takers: tuple[int, ...]) -> str:
        """Why they cannot go on alone; empty where they can."""
        assert self.offer is not None
        if self.offer.others and not self.missing(self.offer.others):
            return "all of its hosts are there"
        if len(members) < self.offer.least:
            return f"{self.offer.least} are the fewest, {len(members)} are left"
        if self._by_handlers:
            return fewer_ranks.by_handlers_cannot(members, takers, self._elastic, self.offer.host)
        noticed = fewer_ranks.noticed(members, self.members)
        differ = "" if len(self.replicas) == 1 else "its ranks do not all hold the same state"
        return noticed or fewer_ranks.cannot_share(members, self._fewer, len(members)) or differ

    def _enter_again(self, again: Again, steps_lost: int) -> list[Action]:
        aux, remarks = auxiliary_states(again.step, self.members, self.buffers)
        if again.arenas is not None:
            aux, remarks = states_to_hand(again, aux)
            remarks += [Remark(text=BACK.format(step=again.step, lost=steps_lost))] if steps_lost else []
        elif again.members or again.step <= self.began_at:  # those that go on have theirs; it was begun with before
            remarks = []
        pids = tuple(member.pid for member in self.members.values() if member.pid)
        ends = tuple(end for one in self.members.values() if one.prepared is not None for end in one.prepared.ends)
        again = msgspec.structs.replace(again, pids=pids, ends=ends, vanished=fewer_ranks.vanished(again, self.address))
        self.again, out = again, self.outcome
        holders = tuple(rank for rank in range(self.world_size) if rank not in again.takers)
        self.state, out.ending, out.step, out.savers = "over", "in_place", again.step, holders or out.savers
        out.lost, out.unused = steps_lost, ()
        order = m.Release(
            recovery=self.recovery, ending="in_place", step=again.step, path="", reason="",
            again=msgspec.structs.replace(again, aux=aux),
        )  # fmt: skip
        releases = [Send(rank=rank, message=order) for rank in self._here if rank not in again.lost]
        kills = [Kill(rank=rank) for rank in again.lost if rank in self.members and not self.members[rank].gone]
        return [RecordPhase(phase="released"), *releases, *kills, *remarks]
