"""The lines that a job logs: one at its start, one per event, one at its end. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lastgasp.events import Fault, Incident

SHOWN = 3
"""Greatest number of faults of one incident that are listed one by one."""
CAUSE = 200
"""Greatest length of a cause in characters; the incident record has all of it."""
STARTING = {"killed": "was killed", "exit": "ended", "exception": "raised an exception"}
"""What happened to a rank before it began to train."""
_SEEN = ("killed", "exit", "hang", "lost")
"""Kinds of faults that the rank itself does not report: its step may be that of an old heartbeat."""
_END = re.compile(r"exited with code \d+|\bSIG[A-Z]+\b")
_ON_HOST = re.compile(r"on (\S+): ")
_SIGNAL = re.compile(r"\bSIG[A-Z]+\b")


def event(incident: Incident) -> str:
    """Describe one recovery: which ranks failed how and in which step, and what was saved by whom and how fast."""
    if incident.rung == "grow":
        return _outcome(incident)
    # A collective that failed on a peer is a symptom, not the cause.
    causes = [fault for fault in incident.faults if fault.kind != "peer"] or incident.faults
    return f"{_faults(causes, incident)}; {_outcome(incident)}"


def _faults(faults: Sequence[Fault], incident: Incident) -> str:
    if not faults:
        return "a fault that left no trace"
    if len(faults) == incident.world_size > 1 and {fault.kind for fault in faults} == {"sigterm"}:
        return "all ranks were asked to stop (SIGTERM)"
    told = [_fault(fault, incident.step_saved or 0) for fault in faults[:SHOWN]]
    more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    return ", ".join(told + more)


def _fault(fault: Fault, saved: int) -> str:
    rank, cause = f"rank {fault.rank}", fault.cause
    if fault.kind in _SEEN and (host := _ON_HOST.match(cause)):
        rank, cause = f"{rank} on {host[1]}", cause[host.end() :]
    if fault.step < 0 and fault.kind in STARTING:
        return f"{rank} {STARTING[fault.kind]} while it was starting ({_how(cause)})"
    signal = _SIGNAL.search(cause)
    cause = _short(cause)
    words = {
        "killed": f"was killed ({signal.group()})" if signal else f"died ({cause})",
        "exception": f"raised {cause}",
        "exit": f"ended in the middle of training ({_how(cause)})",
        "sigterm": "was asked to stop (SIGTERM)",
        "interrupt": "was interrupted (Ctrl-C)",
        "hang": f"hung ({cause})",
        "lost": f"was lost with its host or link ({cause})",
        "peer": f"saw a collective fail ({cause})",
    }
    verb, step = words[fault.kind], fault.step + 1
    if fault.kind in _SEEN and 0 < step < saved:  # the others have completed more with it
        return f"{rank} {verb}, last heard of in step {step}"
    place = f" in step {step}" if step > 0 else ""
    return f"{rank} {verb}{place}" if len(verb) <= 40 else f"{rank}{place} {verb}"


def _how(cause: str) -> str:
    end = _END.search(cause)
    return end.group() if end else _short(cause)


def _short(cause: str) -> str:
    return cause if len(cause) <= CAUSE else cause[:CAUSE] + "..."


def _outcome(incident: Incident) -> str:
    lost = f", {_steps(incident.steps_lost)} lost" if incident.steps_lost else ""
    if incident.ending == "saved":
        savers = f"rank {incident.savers[0]}" if len(incident.savers) == 1 else f"{len(incident.savers)} ranks"
        return f"step {incident.step_saved} saved by {savers}{_took(incident)}{lost}"
    if incident.ending == "in_place":
        then = {
            "retry": "that step is done again",
            "replace": "a new process takes its place",
            "shrink": "training goes on with fewer ranks",
            "grow": "ranks that were missing are taken in",
        }[incident.rung]
        where = "on disk" if incident.from_files else "held in memory"
        return f"step {incident.step_saved} is {where}{lost}; {then}, all other processes stay"
    if incident.ending == "in_arenas":
        return f"step {incident.step_saved} was left in arenas, and training went on with it{lost}"
    if incident.ending == "nothing_to_save":
        return incident.reason or "nothing to save"
    if incident.ending == "gave_up":
        return f"the step could NOT be saved: {incident.reason}{lost}"
    return "the recovery has not ended"


def _took(incident: Incident) -> str:
    phases = incident.phases
    begin, end = phases.fault or phases.detected, phases.committed
    if begin is None or end is None or end < begin:
        return ""
    ms = (end - begin) / 1e6
    return f" in {ms:.0f} ms" if ms < 1000 else f" in {ms / 1000:.1f} s"


def _steps(count: int | None) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def whence(step: int, loaded: bool) -> str:
    """What training begins with: that step, loaded, or nothing (0); where only its first step is known, that."""
    if not loaded:
        return f"its first step is {step + 1}"
    return f"resumes from step {step}" if step else "starts from scratch"


def started(version: str, ranks: int, backend: str, directory: str, whence: str, recovery: str | None = None) -> str:
    """Format the line at the start of an attempt.

    Args:
        backend: which backend leads recoveries, and why, in words.
        whence: as of `whence`.
        recovery: how faults may be answered (`messages.Begin`); None where that is for others to say.
    """
    plural = "1 rank" if ranks == 1 else f"{ranks} ranks"
    answers = "" if recovery is None else f"; recovery={_RECOVERY.get(recovery, recovery)}"
    return f"lastgasp {version}: {plural}, {backend}; checkpoints in {directory}; {whence}{answers}"


_RECOVERY = {"": "restart", "later": "auto (no rank is replaced in a later training of a script)"}


UNPROTECTED = "a rank has ended; the ranks are only registered, so the script's own checkpoints count"
"""A fault in a job whose ranks use no adapter of lastgasp's (`lastgasp.unprotected`)."""


@dataclass
class Tally:
    """What a launcher counts for its final line.

    Attributes:
        steps: the newest step that a rank has completed. survived: incidents after which training continued.
        lost_ns: wall-clock time between faults and the next completed step, ns; what belongs to two faults counts once.
    """

    steps: int = 0
    survived: int = 0
    lost_ns: int = 0
    _lost_until: int = 0
    _counted: set[str] = field(default_factory=set)

    def reached(self, step: int) -> None:
        """Record that a rank has completed this step."""
        self.steps = max(self.steps, step)

    def went_on(self, incident: Incident) -> None:
        """Record that training completed a step after this incident; counted once."""
        begin, end = incident.phases.fault or incident.phases.detected, incident.phases.first_step
        if incident.id in self._counted or end is None:
            return
        self._counted.add(incident.id)
        if incident.rung == "grow":  # it was no fault
            return
        self.survived += 1
        if begin is not None:
            self.lost_ns += max(0, end - max(begin, self._lost_until))
            self._lost_until = max(end, self._lost_until)

    def summary(self, ending: str) -> str:
        """Format the line at the end of the job.

        Args:
            ending: in words: "done", "stopped".
        """
        faults = "1 fault" if self.survived == 1 else f"{self.survived} faults"
        lost = f", {self.lost_ns / 1e9:.1f} s lost to them" if self.survived else ""
        return f"{ending} at step {self.steps}; {faults} survived{lost}"
