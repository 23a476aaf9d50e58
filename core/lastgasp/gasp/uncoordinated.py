"""A rank without a controller saves by the same rule, with itself as the only known holder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp import _clock
from lastgasp.arena import BUDDY_SLOTS
from lastgasp.errors import Moved, NotSaveable
from lastgasp.events import Fault, Incident
from lastgasp.ports import CarriesValues, Contributor, SaveResult, ShardSource, StateSource, own_source
from lastgasp.topology import Place, host_identity

from . import messages as m
from .arena_decision import ArenasHeld, decide_with_arenas
from .arena_files import BadArena, arena_of, save
from .arenas_here import ArenasHere
from .attempt import new_incident, notes_of
from .decision import Decision, GiveUp, NothingToSave, RankView, SavePlan
from .meeting import HERE, MEET, Meeting, Published, Seat, Written, or_lost, unknown
from .rank_status import RankStatus
from .records import write_incident
from .settled import SavedElsewhere
from .views import nothing_new, safe_step

log = logging.getLogger("lastgasp")

OUT_OF_REACH = "without a controller: the random state of the other ranks was out of reach, unless they added it"


@dataclass(frozen=True)
class Known:
    """What else an uncoordinated rank knows.

    Attributes:
        notes: for the incident; read once the recovery is over.
        since_s: when the lost controller had started, unix seconds; None if there never was one.
        aux: auxiliary states of other ranks, by rank, that the controller had given out.
    """

    notes: Sequence[str] = ()
    since_s: int | None = None
    aux: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Case:
    incident: Incident
    fault: Fault
    elsewhere: SavedElsewhere
    hello: m.Hello
    begun: bool
    status: RankStatus
    meeting: Meeting | None
    """Where it meets the survivors of other hosts; None where there never was a controller."""
    aux: Mapping[int, bytes]
    reached: set[int] = field(default_factory=set)
    """Ranks whose auxiliary state is saved with their arenas."""


class _Settled(Exception):
    """The controller's side has saved this step, or a later one; `path` says where."""

    def __init__(self, step: int, path: str) -> None:
        super().__init__(path)
        self.step, self.path = step, path


def recover_uncoordinated(
    status: RankStatus, source: StateSource, place: Place, hello: m.Hello, fault: Fault, known: Known | None = None
) -> m.Release:
    """Decide, save, publish, record. Several survivors may do so at once: publishing is safe against that.

    A rank that was cut off asks before it saves, and again before it publishes, whether the controller's side has saved
    this step or a later one. The first commit of a step is never replaced; the others add the random states
    that it lacks.
    """
    known = known or Known()
    incident = new_incident(hello, 0, _clock.wall_ns(), led_by=f"rank {place.rank}")
    incident.id += f"-rank{place.rank}"  # at the same moment, with the same process id, on another host
    incident.faults, incident.phases.fault = [fault], fault.seen_ns
    incident.phases.detected = _clock.wall_ns()
    status.all_run = fault.kind == "sigterm"
    elsewhere = SavedElsewhere(Path(hello.directory), hello.job, hello.attempt, known.since_s)
    meeting = None if known.since_s is None else Meeting(Path(hello.directory), place, known.since_s)
    case = _Case(incident, fault, elsewhere, hello, status.phase != "start", status, meeting, known.aux)
    try:
        outcome = _decide_and_save(status, source, place, hello.finish_timeout, case)
    except Moved as moved:  # the gate is closed, so a rank can complete at most one more step
        log.warning("%s", moved)
        outcome = _decide_and_save(status, source, place, hello.finish_timeout, case, last=True)
    incident.phases.released = _clock.wall_ns()
    incident.notes += known.notes
    unreached = {*range(place.world_size)} - case.reached - {place.rank}
    if unreached and (incident.savers or incident.ending != "saved"):
        incident.notes.append(OUT_OF_REACH)
    try:
        write_incident(incident, Path(hello.directory))
    except OSError as error:  # the checkpoint matters more than its record
        log.error("the incident could not be written to %s: %s", hello.directory, error)
    return outcome


def _decide_and_save(
    status: RankStatus, source: StateSource, place: Place, finish: float, case: _Case, last: bool = False
) -> m.Release:
    """Raises Moved, but not the `last` time."""
    here, own = ArenasHere.look(source), _own_view(status, place, finish)
    decision = _decide(status, place, own, here.held())
    case.incident.phases.agreed = _clock.wall_ns()
    if not isinstance(decision, SavePlan) and case.meeting is not None and _needs_others(source):
        return _save_together(status, own, source, case, here)
    while True:
        try:
            return _carry_out(decision, source, case, last, here)
        except BadArena as error:
            log.warning("%s", error)
            assert isinstance(decision, SavePlan)
            own = _own_view(status, place, finish)
            decision = _decide(status, place, own, here.without(error.rank, decision.step))


def _own_view(status: RankStatus, place: Place, finish: float) -> RankView:
    """What this rank holds, once its training thread has left its update, or after `finish` seconds."""
    deadline = _clock.monotonic() + finish
    trouble = status.look_again()
    while (trouble or not status.consistent) and not status.broken and _clock.monotonic() < deadline:
        threading.Event().wait(0.001)
        trouble = status.look_again()
    why = status.broken or trouble or ("" if status.consistent else f"still inside its update after {finish:g} s")
    return RankView(rank=place.rank, step=status.step, holds=not why, why=why, writes=True)


def _decide(status: RankStatus, place: Place, own: RankView, held: ArenasHeld) -> Decision:
    views = tuple(own if rank == place.rank else unknown(rank) for rank in range(place.world_size))
    decision = decide_with_arenas(views, place.replicas, status.durable, held)
    return or_lost(decision, own.step, status.durable)


def _carry_out(decision: Decision, source: StateSource, case: _Case, last: bool, here: ArenasHere) -> m.Release:
    incident = case.incident
    incident.unused = list(decision.unused)
    if isinstance(decision, NothingToSave):
        incident.ending, incident.steps_lost = "nothing_to_save", 0
        incident.reason = nothing_new(decision.step, case.begun)
        known = safe_step(decision.step, case.begun)
        return _release(incident, -1 if known is None else known, "")
    if isinstance(decision, GiveUp):
        incident.ending, incident.reason, incident.steps_lost = "gave_up", decision.reason, decision.lost
        return _release(incident, -1, "")
    incident.steps_lost = decision.lost
    try:
        result = _save(decision, source, case, here)
    except BadArena:
        raise
    except _Settled as settled:
        return _as_settled(incident, settled, source, decision.step)
    except Exception as error:  # whatever it is, the record says so
        if isinstance(error, Moved) and not last:
            raise
        log.exception("the save of step %d failed", decision.step)
        incident.ending, incident.reason = "gave_up", m.one_line(error)
        incident.steps_lost = decision.lost + max(0, decision.step - case.status.durable)
        return _release(incident, -1, "")
    incident.ending, incident.step_saved, incident.files = "saved", decision.step, [result.path]
    incident.savers, incident.nbytes = sorted(set(decision.savers)), result.nbytes
    incident.notes += notes_of(decision)
    return _release(incident, decision.step, result.path)


def _as_settled(incident: Incident, settled: _Settled, source: StateSource, step: int) -> m.Release:
    incident.ending, incident.step_saved, incident.files = "saved", settled.step, [settled.path]
    added = _contributed(source, step, settled.path) if settled.step == step else ""
    note = f"cut off from the controller, whose side had saved step {settled.step} already: that one was kept"
    note += f"; {added}" if added else ""
    log.warning("%s (%s)", note, settled.path)
    incident.notes.append(note)
    return _release(incident, settled.step, settled.path)


def _contributed(source: StateSource, step: int, path: str) -> str:
    contributor = own_source(source)
    if not isinstance(contributor, Contributor):
        return ""
    try:
        return contributor.contribute(step, path)
    except Exception as error:  # from an adapter; the step is saved nevertheless
        log.exception("the auxiliary state of step %d could not be added to %s", step, path)
        return m.one_line(error)


def _save(plan: SavePlan, source: StateSource, case: _Case, here: ArenasHere) -> SaveResult:
    incident, fault = case.incident, case.fault
    if found := case.elsewhere.look(plan.step):
        raise _Settled(*found)
    aux = dict(case.aux) | ({source.rank: own} if (own := capture_or_nothing(source, plan.step)) else {})
    why, references = f"rank {fault.rank}: {fault.cause}", here.references(plan.arenas)
    order = m.Save(
        recovery=0, plan=0, step=plan.step, aux=aux, reason=why, own=-1 in plan.arenas, common=plan.common,
        arenas=references,
    )  # fmt: skip
    result = save(source, order) if references else source.save(plan.step, aux, why)
    case.reached.update(plan.arenas, case.aux)
    incident.phases.first_byte, incident.phases.saved = result.first_byte_ns, _clock.wall_ns()
    # Both were saving at the same time. A contributor still publishes: it finds the first commit, and adds to it.
    if found := case.elsewhere.look(plan.step + isinstance(own_source(source), Contributor)):
        source.discard(result)
        raise _Settled(*found)
    if note := source.publish(result, {source.rank: result.part}):
        log.warning("%s", note)
        incident.notes.append(note)
    incident.phases.committed = _clock.wall_ns()
    return result


def capture_or_nothing(source: StateSource, step: int) -> bytes:
    """This rank's auxiliary state; empty if that fails: the step matters more than its random state."""
    try:
        return source.capture(step)
    except BaseException:  # from an adapter: the caller must survive
        log.exception("the auxiliary state of step %d could not be captured", step)
        return b""


def values_of(source: StateSource, step: int) -> bytes | None:
    """What goes behind it; None while that is being made. Never raises."""
    own = own_source(source)
    try:
        return own.values(step) if isinstance(own, CarriesValues) else b""
    except Exception:  # from an adapter: the step matters more
        log.exception("the values of step %d could not be written", step)
        return b""


# -- together with other survivors ----------------------------------------------------------------


def called_by(directory: Path, place: Place, source: StateSource, since_s: int | None) -> Callable[[], bool] | None:
    """What says whether others wait for this rank once the controller is gone; None where none will."""
    if since_s is None or place.world_size == 1:
        return None
    meeting = Meeting(directory, place, since_s)
    return lambda: _needs_others(source) and meeting.called()


def _needs_others(source: StateSource) -> bool:
    """Other ranks may hold parts that this one lacks."""
    return isinstance(own_source(source), ShardSource)


def _goes_to_partners(source: StateSource) -> bool:
    """Copies of this rank's arena go to a partner host, so the survivors of other hosts may hold what is missing."""
    own = arena_of(source)
    return own is not None and own.slots == BUDDY_SLOTS


def _save_together(
    status: RankStatus, own: RankView, source: StateSource, case: _Case, here: ArenasHere
) -> m.Release:
    """Other ranks hold what is missing here: agree with them on what all of them hold, and save a part of that."""
    incident, meeting = case.incident, case.meeting
    assert meeting is not None
    seat = Seat(
        rank=own.rank,
        host=host_identity(),
        step=own.step,
        durable=status.durable,
        why=own.why,
        arenas=here.steps(copies=False),
        copies=here.steps(copies=True),
    )

    def look_elsewhere() -> None:
        if found := case.elsewhere.look(status.durable + 1):
            raise _Settled(*found)

    try:
        meeting.join(seat)
        seconds = MEET if _goes_to_partners(source) else HERE + case.hello.finish_timeout
        decision = meeting.agree(min(seconds, case.hello.save_timeout / 2), look_elsewhere)
        incident.phases.agreed = _clock.wall_ns()
        if not isinstance(decision, SavePlan):
            return _carry_out(decision, source, case, True, here)
        incident.unused, incident.steps_lost = list(decision.unused), decision.lost
        incident.savers, incident.led_by = sorted(set(decision.savers)), f"rank {min(decision.savers)}"
        path = _save_part(decision, meeting, source, case)
    except _Settled as settled:
        return _as_settled(incident, settled, source, status.step)
    except Exception as error:  # whatever it is, the record says so
        log.exception("the survivors could not save together")
        incident.ending, incident.reason = "gave_up", f"the survivors could not save together: {m.one_line(error)}"
        incident.steps_lost = max(0, status.step - status.durable)
        return _release(incident, -1, "")
    incident.ending, incident.step_saved, incident.files = "saved", decision.step, [path]
    incident.notes += notes_of(decision)
    return _release(incident, decision.step, path)


def _save_part(plan: SavePlan, meeting: Meeting, source: StateSource, case: _Case) -> str:
    """Do what the plan says of this rank; returns where the checkpoint stands once it is published.

    Raises:
        NotSaveable, DeadlineExceeded, OSError: it is not; what this rank has written is removed.
        _Settled: the controller's side has saved this step, or a later one.
    """
    limit = _clock.monotonic() + case.hello.save_timeout
    result: SaveResult | None = None
    try:
        if source.rank in plan.savers:
            result = _written(plan, meeting, source, case)
            case.incident.phases.first_byte, case.incident.phases.saved = result.first_byte_ns, _clock.wall_ns()
        if result is not None and source.rank == min(plan.savers):
            done = _publish(plan, result, meeting, source, case, limit)
        else:
            done = meeting.published(limit + case.hello.save_timeout / 2)
        if done.why:
            raise NotSaveable(done.why)
        if done.elsewhere:
            raise _Settled(done.step, done.path)
    except BaseException:
        if result is not None:
            source.discard(result)
        raise
    case.incident.phases.committed, case.incident.nbytes = _clock.wall_ns(), done.nbytes
    case.reached.update(owner if owner >= 0 else saver for saver, owner in _holders(plan))
    return done.path


def _holders(plan: SavePlan) -> list[tuple[int, int]]:
    """Each saver, with the rank whose arena it writes; -1: its own state."""
    return list(zip(plan.savers, plan.arenas or (-1,) * len(plan.savers), strict=True))


def _written(plan: SavePlan, meeting: Meeting, source: StateSource, case: _Case) -> SaveResult:
    """This rank's part of the plan, of which it tells the others. Raises as `arena_files.save`."""
    mine = [owner for saver, owner in _holders(plan) if saver == source.rank]
    try:
        own = capture_or_nothing(source, plan.step)
        order = m.Save(
            recovery=0, plan=0, step=plan.step, aux={source.rank: own} if own else {},
            reason=f"rank {case.fault.rank}: {case.fault.cause}", own=-1 in mine, common=plan.common,
            arenas=ArenasHere.look(source).references(mine),
        )  # fmt: skip
        result = save(source, order)
    except BaseException as error:
        meeting.wrote(Written(why=m.one_line(error)))
        raise
    meeting.wrote(Written(part=result.part, nbytes=result.nbytes))
    return result


def _publish(
    plan: SavePlan, result: SaveResult, meeting: Meeting, source: StateSource, case: _Case, limit: float
) -> Published:
    """Once all have written, by `limit`, make it visible and tell the others. Raises as `_save_part`."""
    try:
        written = meeting.parts(plan.savers, limit)
        if found := case.elsewhere.look(plan.step):
            raise _Settled(*found)
        note = source.publish(result, {rank: one.part for rank, one in written.items()})
    except _Settled as settled:
        meeting.publish(Published(step=settled.step, path=settled.path, elsewhere=True))
        raise
    except BaseException as error:
        meeting.publish(Published(why=m.one_line(error)))
        raise
    if note:
        log.warning("%s", note)
        case.incident.notes.append(note)
    done = Published(step=plan.step, path=result.path, nbytes=sum(one.nbytes for one in written.values()))
    try:
        meeting.publish(done)
    except OSError:  # it is saved, although the others will not hear of it
        log.exception("the other survivors could not be told that step %d is saved", plan.step)
    return done


def _release(incident: Incident, step: int, path: str) -> m.Release:
    return m.Release(recovery=0, ending=incident.ending, step=step, path=path, reason=incident.reason)
