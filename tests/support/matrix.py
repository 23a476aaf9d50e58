"""The matrix of faults: kind x moment x rank x launcher x world size, and what must hold for each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from lastgasp.checkpoint import candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.ports import Layout
from lastgasp.testing.jobs import Finished, run_job
from support import lean, taskd_reader
from support.ports import free_port

K = TypeVar("K")
V = TypeVar("V")

SCRIPT = Path(__file__).with_name("train_tiny.py")

KINDS = ("sigkill", "exception", "exit3", "sigterm", "sigterm-all", "sigstop", "killed-while-raising")
MOMENTS = ("data", "forward", "backward", "update", "after_update", "periodic_save", "gasp_save")
LAUNCHERS = ("run", "torchrun", "script")
RANKS = ("first", "last")
STEP = 5
"""The step under way at the fault (5 are completed); a periodic save is at 4 and at 8."""
SAVE_STEP = 4
LAST_STEP = 12
LIMIT = 400.0
"""Seconds for one job with its restarts, on a loaded machine."""


@dataclass(frozen=True)
class Case:
    """One job with one fault (or two)."""

    kind: str
    moment: str
    rank: str
    launcher: str
    world: int = 2

    def __str__(self) -> str:
        return f"{self.kind}-{self.moment}-{self.rank}-{self.launcher}-{self.world}"

    @property
    def victim(self) -> int:
        """The rank that the fault happens on."""
        return 0 if self.rank == "first" else self.world - 1

    @property
    def other(self) -> int:
        """A rank that it does not happen on."""
        return self.world - 1 if self.rank == "first" else 0

    @property
    def faults(self) -> str:
        """The value of LASTGASP_FAULT."""
        if self.moment == "gasp_save":
            return self._during_gasp()
        step = SAVE_STEP if self.moment == "periodic_save" else STEP
        where = f"step={step},phase={self.moment}"
        if self.kind == "sigterm-all":
            return f"kind=sigterm,rank=all,{where}"
        if self.kind == "killed-while-raising":
            return f"kind=sigkill,rank={self.victim},{where};kind=exception,rank={self.other},{where}"
        return f"kind={self.kind},rank={self.victim},{where}"

    def _during_gasp(self) -> str:
        """The victim dies in the forward pass; the fault then hits whoever saves."""
        first = f"kind=sigkill,rank={self.victim},step={STEP},phase=forward"
        kind = {"sigterm-all": "sigterm", "killed-while-raising": "sigkill"}.get(self.kind, self.kind)
        saver = 1 if self.victim == 0 else 0
        return first + f";kind={kind},rank={saver},phase=gasp_save"

    @property
    def fired(self) -> int:
        """The least number of faults that must have fired."""
        if self.kind == "killed-while-raising" and self.moment not in ("gasp_save",):
            return 1  # the second one may die of the first before it gets there
        return 2 if self.moment == "gasp_save" else 1

    @property
    def should_give_up(self) -> bool:
        """Whether a save is impossible: of two ranks both are gone, or one is gone and the other inside its update."""
        if self.world > 2:
            return False
        if self.moment == "gasp_save":
            return self.kind in ("sigkill", "sigstop", "killed-while-raising")
        return self.kind == "killed-while-raising" and self.moment == "update"

    @property
    def exact_step(self) -> int | None:
        """The step that must be saved; None where the signal is asynchronous and some steps may follow."""
        if self.kind in ("sigterm", "sigterm-all") and self.moment != "gasp_save":
            return None
        if self.moment == "periodic_save":
            return SAVE_STEP
        if self.moment in ("update", "after_update"):
            return STEP + 1
        return STEP

    @property
    def unmarked(self) -> set[int]:
        """Steps whose rows may be missing: those that ended on no rank, or on one that got no further than its update.

        The step of a fault between update and boundary counts as completed, and no rank goes on to its end.
        """
        torn = self.moment in ("update", "after_update") or self.kind in ("sigterm", "sigterm-all")
        return {STEP + 1} if torn else set()

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        script = [str(SCRIPT), "--dir", str(directory), "--final", str(final), "--devices", str(self.world)]
        ranks = ["--nproc-per-node", str(self.world)]
        if self.launcher == "run":
            return [lean.python(), "-m", "lastgasp", "run", *ranks, *script]
        if self.launcher == "torchrun":
            return [lean.python(), "-m", "torch.distributed.run", "--standalone", *ranks, *script]
        return [lean.python(), *script]


def all_cases() -> list[Case]:
    """Every combination."""
    product = itertools.product(KINDS, MOMENTS, RANKS, LAUNCHERS, (2, 3))
    return [Case(*combination) for combination in product]


def covering_cases() -> list[Case]:
    """What runs with every test round: a kill and a request to stop, with and without a launcher, one of each rank."""
    return [
        Case("sigkill", "backward", "last", "run", 2),
        Case("sigterm-all", "after_update", "first", "script", 2),
    ]


def check_marks(case: Case, base: Path) -> None:
    """Each rank's every step is on disk, also that of the killed one; complete, once in each attempt that took it."""
    wanted, unmarked = set(range(1, LAST_STEP + 1)), set(case.unmarked)
    if case.exact_step is None and (saved := first_incident(base.parent).step_saved):
        unmarked.add(saved)  # a signal is seen some steps later on a busy machine
    for rank in range(case.world):
        found: list[int] = []
        for folder in sorted(base.glob(f"*/{rank}")):
            taken = taskd_reader.read(folder)
            assert taken.open == {}
            assert not [name for name in taken.names if name.startswith("dropped")]
            found += [int(name.split()[1]) for name in taken.names if name.startswith("step ")]
        assert wanted - set(found) <= unmarked, f"rank {rank}: {found}, but for {unmarked}"
        restarts = sum(later <= earlier for earlier, later in itertools.pairwise(found))
        assert restarts <= 1, f"rank {rank}: {found}"


# -- running a case, and looking at what it left ------------------------------------------------------


class AnyCase(Protocol):
    """What is asked of the case of any framework."""

    @property
    def kind(self) -> str: ...
    @property
    def moment(self) -> str: ...
    @property
    def launcher(self) -> str: ...
    @property
    def should_give_up(self) -> bool: ...
    @property
    def exact_step(self) -> int | None: ...
    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""


class References(dict[K, V]):
    """Results of uninterrupted jobs; each is made by `make` when it is first asked for."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make

    def __missing__(self, key: K) -> V:
        self[key] = made = self._make(key)
        return made


def undisturbed(case: AnyCase, folder: Path) -> Path:
    """The final weights of a job without a fault."""
    folder.mkdir(exist_ok=True)
    done = run_job(case.command(folder / "ckpts", folder / "final.pt"), folder / "log", timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    return folder / "final.pt"


def run_case(case: AnyCase, folder: Path, environment: Mapping[str, str], grace: float = 30.0) -> Finished:
    """The job, which saves in `ckpts`."""
    own = {"LASTGASP_HANG_TIMEOUT": "8"} if case.kind == "sigstop" else {}
    if case.launcher == "script":  # it would take one that anybody may have before it is used
        own["MASTER_PORT"] = str(free_port())
    command = case.command(folder / "ckpts", folder / "final.pt")
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    return run_job(command, log, timeout=LIMIT, environ=os.environ | dict(environment) | own, grace=grace)


def check_saved(case: AnyCase, directory: Path, done: Finished, layout: Layout, older: str) -> None:
    """No step is lost, what was saved verifies, and the periodic checkpoint called `older` was not written anew."""
    incident = first_incident(directory)
    where = f"{incident}\n{done.output[-4000:]}"
    found = {c.path.name: c for c in candidates([directory], layout)}
    assert all(verify(c.path, layout).ok for c in found.values()), where
    manifest = found[older].manifest if case.moment != "periodic_save" else None
    assert manifest is None or manifest.attempt == 0, "the older checkpoint was written anew"
    if case.should_give_up:  # the job continues from the periodic checkpoint instead, and the record says why
        assert incident.ending == "gave_up", where
        assert "no live holder" in incident.reason
        return
    assert incident.ending in ("saved", "nothing_to_save"), where
    assert incident.steps_lost == 0, where
    step = incident.step_saved if incident.step_saved is not None else SAVE_STEP
    if case.exact_step is not None:
        # What one rank raised in counts as begun, but another one may not have come to its own update by then.
        early = {case.exact_step - 1} if case.moment == "update" and case.kind == "exception" else set()
        assert step in {case.exact_step} | early, where
    assert [c for c in found.values() if c.step == step], where


def first_incident(directory: Path) -> Incident:
    """The oldest one that is recorded there."""
    records = [decode_incident(path.read_bytes()) for path in (directory / "incidents").glob("*.json")]
    assert records, "no incident was recorded"
    return min(records, key=lambda incident: incident.id)
