"""The matrix of faults: kind x moment x rank x launcher x world size, and what must hold for each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from support import lean, taskd_reader

SCRIPT = Path(__file__).with_name("train_tiny.py")

KINDS = ("sigkill", "exception", "exit3", "sigterm", "sigterm-all", "sigstop", "killed-while-raising")
MOMENTS = ("data", "forward", "backward", "update", "after_update", "periodic_save", "gasp_save")
LAUNCHERS = ("run", "torchrun", "script")
RANKS = ("first", "last")
STEP = 5
"""The step under way at the fault (5 are completed); a periodic save is at 4 and at 8."""
SAVE_STEP = 4
LAST_STEP = 12


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
        """Whether physics forbid a save: of two ranks both are gone, or one is gone and the other torn."""
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
    """Each rank's every step is on disk, that of the killed one too; whole, and once in each attempt that took it."""
    wanted = set(range(1, LAST_STEP + 1))
    for rank in range(case.world):
        found: list[int] = []
        for folder in sorted(base.glob(f"*/{rank}")):
            taken = taskd_reader.read(folder)
            assert taken.open == {}
            assert not [name for name in taken.names if name.startswith("dropped")]
            found += [int(name.split()[1]) for name in taken.names if name.startswith("step ")]
        assert wanted - set(found) <= case.unmarked, f"rank {rank}: {found}"
        restarts = sum(later <= earlier for earlier, later in itertools.pairwise(found))
        assert restarts <= 1, f"rank {rank}: {found}"
