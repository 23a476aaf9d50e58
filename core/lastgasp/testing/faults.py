"""Faults addressed by rank, step and phase, for tests, drills and the demo.

One fault is a list of `field=value`, several are separated by `;`:

    LASTGASP_FAULT="kind=sigkill,rank=0,step=12,phase=backward;kind=exception,rank=1,step=12,phase=backward"

The step is the one under way, counted in completed optimizer updates: `step=12` is the step that turns
12 updates into 13, whatever its phase. An adapter calls `FaultKit.fire_at(phase, step)` at each phase;
the engine calls the module's `fire_at("gasp_save")`, which does nothing unless a kit is installed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lastgasp import _clock
from lastgasp.errors import ConfigError, LastgaspError

log = logging.getLogger("lastgasp")

ENV_FAULT = "LASTGASP_FAULT"
ENV_LOG = "LASTGASP_FAULT_LOG"

KINDS = ("sigkill", "sigstop", "sigterm", "exception", "exit3", "sleep")
STEP_PHASES = ("data", "forward", "backward", "before_update", "update", "after_update", "step_end")
LATER_PHASES = ("periodic_save", "gasp_save", "validation", "arena_copy")
"""Phases that not every step has: a fault fires at the first occurrence at or after its step."""
PHASES = STEP_PHASES + LATER_PHASES

ALL_RANKS = -1
ANY_STEP = -1


class InjectedFault(LastgaspError, RuntimeError):
    """The exception that `kind=exception` raises."""


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One fault to be injected.

    Attributes:
        kind: one of `KINDS`.
        phase: one of `PHASES`.
        rank: the rank it happens on; `ALL_RANKS` (`rank=all`) for each.
        step: the step under way; `ANY_STEP` (left out) for the first time the phase is reached.
        attempt: the launcher's restart count in which it happens.
        incarnation: how many recoveries in place must have come before it in this attempt.
        seconds: how long `kind=sleep:SECONDS` sleeps.
    """

    kind: str
    phase: str
    rank: int = 0
    step: int = ANY_STEP
    attempt: int = 0
    incarnation: int = 0
    seconds: float = 0.0

    def due(self, phase: str, step: int, rank: int, attempt: int) -> bool:
        """Whether the fault happens here."""
        if phase != self.phase or attempt != self.attempt or self.rank not in (ALL_RANKS, rank):
            return False
        if self.step == ANY_STEP or self.step == step:
            return True
        return phase in LATER_PHASES and step >= self.step


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Read the value of `LASTGASP_FAULT`.

    Raises:
        ConfigError: an unknown field, kind or phase, or an invalid number.
    """
    return tuple(_parse_one(part) for part in text.split(";") if part.strip())


def _parse_one(text: str) -> FaultSpec:
    fields: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or name not in _READERS or name in fields:
            raise ConfigError(ENV_FAULT, item, f"field=value with each of {sorted(_READERS)} at most once",
                              "Separate fields by ',' and faults by ';'.")  # fmt: skip
        fields[name] = value
    for name in ("kind", "phase"):
        if name not in fields:
            raise ConfigError(ENV_FAULT, text, f"a fault with {name}=...", "Name its kind and its phase.")
    values: dict[str, object] = {}
    for name, value in fields.items():
        values.update(_READERS[name](value))
    return FaultSpec(**values)  # type: ignore[arg-type]


def _read_kind(value: str) -> dict[str, object]:
    kind, colon, seconds = value.partition(":")
    if kind not in KINDS or bool(colon) != (kind == "sleep"):
        raise ConfigError(f"{ENV_FAULT} kind", value, f"one of {KINDS}, sleep as sleep:SECONDS", "Fix it.")
    return {"kind": kind, "seconds": _seconds(seconds)} if colon else {"kind": kind}


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise ConfigError(f"{ENV_FAULT} kind", f"sleep:{value}", "sleep:SECONDS, 0 or more", "Fix it.")
    return seconds


def _read_phase(value: str) -> dict[str, object]:
    if value not in PHASES:
        raise ConfigError(f"{ENV_FAULT} phase", value, f"one of {PHASES}", "Fix the spelling.")
    return {"phase": value}


def _read_count(name: str, word: str = "", meaning: int = 0) -> Callable[[str], dict[str, object]]:
    def read(value: str) -> dict[str, object]:
        if word and value == word:
            return {name: meaning}
        if not value.isascii() or not value.isdigit():
            allowed = f"an integer of at least 0{f' or {word!r}' if word else ''}"
            raise ConfigError(f"{ENV_FAULT} {name}", value, allowed, "Fix the number.")
        return {name: int(value)}

    return read


_READERS: Mapping[str, Callable[[str], dict[str, object]]] = {
    "kind": _read_kind,
    "phase": _read_phase,
    "rank": _read_count("rank", "all", ALL_RANKS),
    "step": _read_count("step", "any", ANY_STEP),
    "attempt": _read_count("attempt"),
    "incarnation": _read_count("incarnation"),
}


def perform(spec: FaultSpec) -> None:
    """Cause the fault in this process, immediately. A sigkill does not return.

    Raises:
        InjectedFault: kind exception.
        SystemExit: kind exit3, with code 3.
    """
    if spec.kind == "exception":
        raise InjectedFault(f"injected by {ENV_FAULT} in {spec.phase}")
    if spec.kind == "exit3":
        raise SystemExit(3)
    if spec.kind == "sleep":
        time.sleep(spec.seconds)
    else:
        os.kill(os.getpid(), getattr(signal, spec.kind.upper()))


class FaultKit:
    """The faults of one process; each fires at most once.

    Args:
        specs: what is to happen, on all ranks and attempts.
        rank: this process's rank; may be set later, when the framework knows it.
        attempt: the launcher's restart count.
        log: a file that gets one JSON line per fault, on disk before the fault happens; None for no log.
        act: causes a fault; tests replace it.
        incarnation: how many recoveries in place this attempt has seen.
    """

    def __init__(
        self,
        specs: tuple[FaultSpec, ...],
        rank: int = 0,
        attempt: int = 0,
        log: Path | None = None,
        act: Callable[[FaultSpec], None] = perform,
        incarnation: int = 0,
    ) -> None:
        self.rank, self.attempt = rank, attempt
        self._specs, self._incarnation = specs, incarnation
        self._pending = [spec for spec in specs if spec.incarnation == incarnation]
        self._log, self._act = log, act

    def entered(self, environ: Mapping[str, str] = os.environ) -> None:
        """A training begins: where it was entered again in this process, its faults are those of this incarnation."""
        incarnation = int(environ.get("LASTGASP_INCARNATION") or 0)
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._pending = [spec for spec in self._specs if spec.incarnation == incarnation]

    def due(self, phase: str, step: int) -> bool:
        """Whether `fire_at` with the same arguments would do something."""
        return any(spec.due(phase, step, self.rank, self.attempt) for spec in self._pending)

    def fire_at(self, phase: str, step: int = ANY_STEP) -> None:
        """Perform each fault that is due in this phase of the step under way, in the order they were given.

        Args:
            phase: one of `PHASES`.
            step: completed updates when the step began; `ANY_STEP` if the caller does not know it
                (then only faults without a step fire).

        Raises:
            InjectedFault, SystemExit: as `perform`.
        """
        for spec in [s for s in self._pending if s.due(phase, step, self.rank, self.attempt)]:
            self._pending.remove(spec)
            self._record(spec, step)
            self._act(spec)

    def pending(self) -> list[FaultSpec]:
        """Faults of this rank and attempt that have not happened."""
        return [s for s in self._pending if s.rank in (ALL_RANKS, self.rank) and s.attempt == self.attempt]

    def _record(self, spec: FaultSpec, step: int) -> None:
        if self._log is None:
            return
        here = {"at_rank": self.rank, "at_step": step, "pid": os.getpid(), "wall_ns": _clock.wall_ns()}
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, json.dumps(asdict(spec) | here).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_installed: FaultKit | None = None


def install(kit: FaultKit | None) -> None:
    """Make the module's `fire_at` use `kit`; None uninstalls the current one and logs which faults did not happen."""
    global _installed
    if kit is None and _installed is not None:
        for spec in _installed.pending():
            step = "" if spec.step == ANY_STEP else f",step={spec.step}"
            log.warning(
                "%s: kind=%s,rank=%d,phase=%s%s did not happen: this training did not reach it",
                ENV_FAULT, spec.kind, spec.rank, spec.phase, step,
            )  # fmt: skip
    _installed = kit


def fire_at(phase: str, step: int = ANY_STEP) -> None:
    """`FaultKit.fire_at` of the installed kit; does nothing if none is installed.

    Raises:
        InjectedFault, SystemExit: as `perform`.
    """
    if _installed is not None:
        _installed.fire_at(phase, step)


def kit_from_env(environ: Mapping[str, str] = os.environ) -> FaultKit | None:
    """The kit described by the environment, or None.

    Rank and attempt are the launcher's `RANK` and `LASTGASP_ATTEMPT` (else torchrun's count), 0 where not set.

    Raises:
        ConfigError: `LASTGASP_FAULT` is malformed or names a rank that the job does not have, or `LASTGASP_FAULT_LOG`
            cannot be written.
    """
    text = environ.get(ENV_FAULT, "")
    if not text.strip():
        return None
    log, specs = environ.get(ENV_LOG), parse_faults(text)
    attempt = int(environ.get("LASTGASP_ATTEMPT") or environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    incarnation = int(environ.get("LASTGASP_INCARNATION") or 0)
    if attempt == incarnation == 0 and environ.get("RANK") and (ranks := environ.get("WORLD_SIZE", "")).isdigit():
        _require_ranks(specs, int(ranks))  # later there may be fewer
    return FaultKit(
        specs,
        rank=int(environ.get("RANK", "0")),
        attempt=attempt,
        log=_writable(log) if log else None,
        incarnation=incarnation,
    )


def _require_ranks(specs: tuple[FaultSpec, ...], ranks: int) -> None:
    for spec in specs:
        if spec.rank >= ranks and spec.attempt == spec.incarnation == 0:
            raise ConfigError(f"{ENV_FAULT} rank", spec.rank, f"a rank of this job, 0 to {ranks - 1}", "Fix the rank.")


def _writable(name: str) -> Path:
    """Looked at before the training: a fault that cannot be logged would be another fault than the one asked for."""
    path = Path(name)
    there = path.exists()
    if not os.access(path if there else path.parent, os.W_OK) or (there and not path.is_file()):
        raise ConfigError(ENV_LOG, name, "a file that can be written", "Make its directory, or name another file.")
    return path


def read_log(path: Path) -> list[dict[str, object]]:
    """The faults that fired, in order: the fields of `FaultSpec` and at_rank, at_step, pid, wall_ns.

    An absent file is an empty list: nothing fired. A line that is still being written does not count yet.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
