"""A rank without a controller saves by the same rule, with itself as the only known holder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp import _clock
from lastgasp.errors import Moved
from lastgasp.events import Fault, Incident
from lastgasp.ports import Contributor, SaveResult, StateSource, own_source
from lastgasp.topology import Place

from . import messages as m
from .arena_decision import ArenasHeld, decide_with_arenas
from .arena_files import BadArena, save
from .arenas_here import ArenasHere
from .attempt import new_incident, notes_of, write_incident
from .decision import Decision, GiveUp, NothingToSave, RankView, SavePlan
from .rank_status import RankStatus
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
    """

    notes: Sequence[str] = ()
    since_s: int | None = None


@dataclass(frozen=True)
class _Case:
    incident: Incident
    fault: Fault
    elsewhere: SavedElsewhere
    begun: bool
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
    incident.faults, incident.phases.fault = [fault], fault.seen_ns
    incident.phases.detected = _clock.wall_ns()
    status.all_run = fault.kind == "sigterm"
    elsewhere = SavedElsewhere(Path(hello.directory), hello.job, hello.attempt, known.since_s)
    case = _Case(incident, fault, elsewhere, begun=status.phase != "start")
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
    here = ArenasHere.of_launcher(source)
    decision = _decide(status, place, finish, here.held())
    case.incident.phases.agreed = _clock.wall_ns()
    while True:
        try:
            return _carry_out(decision, source, case, last, here)
        except BadArena as error:
            log.warning("%s", error)
            assert isinstance(decision, SavePlan)
            decision = _decide(status, place, finish, here.without(error.rank, decision.step))


def _decide(status: RankStatus, place: Place, finish: float, held: ArenasHeld) -> Decision:
    deadline = _clock.monotonic() + finish
    trouble = status.look_again()
    while (trouble or not status.consistent) and not status.broken and _clock.monotonic() < deadline:
        threading.Event().wait(0.001)
        trouble = status.look_again()
    why = status.broken or trouble or ("" if status.consistent else f"still inside its update after {finish:g} s")
    views = tuple(
        RankView(rank=r, step=status.step, holds=not why, why=why, writes=True)
        if r == place.rank
        else RankView(rank=r, step=-1, holds=False, alive=False, why="unknown: the controller is gone")
        for r in range(place.world_size)
    )
    return decide_with_arenas(views, place.replicas, status.durable, held)


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
        incident.steps_lost = decision.lost + 1
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
    aux = {source.rank: own} if (own := capture_or_nothing(source, plan.step)) else {}
    why, references = f"rank {fault.rank}: {fault.cause}", here.references(plan.arenas)
    order = m.Save(
        recovery=0, plan=0, step=plan.step, aux=aux, reason=why, own=-1 in plan.arenas, common=plan.common,
        arenas=references,
    )  # fmt: skip
    result = save(source, order) if references else source.save(plan.step, aux, why)
    case.reached.update(plan.arenas)
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


def _release(incident: Incident, step: int, path: str) -> m.Release:
    return m.Release(recovery=0, ending=incident.ending, step=step, path=path, reason=incident.reason)
