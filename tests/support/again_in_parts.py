"""Jobs of which each rank holds a part and whose training is entered again: a loop, a fit of Lightning's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lastgasp.ports import Layout
from lastgasp.pytorch.sharded import LAYOUT
from lastgasp.testing.weights import differences
from lastgasp_lightning.checkpoint_io import SHARDED
from support import logged
from support.disturbed import disturbed, lines
from support.launchers import SUPPORT, incidents, run

MOMENTS = ("forward", "backward", "update", "step_end", "arena_copy")
SEEN = {"sigkill": "killed", "sigstop": "hang", "exception": "exception"}


@dataclass(frozen=True)
class Job:
    """A script of twelve steps.

    Attributes:
        layout: of its checkpoints; restarts: options where the job does, which costs it plain values.
    """

    name: str
    script: Path
    layout: Layout
    restarts: tuple[str, ...] = ()

    def command(self, directory: Path, shape: str, ranks: int, *more: str) -> list[str]:
        """Its command line."""
        return run(self.script, "--dir", directory, "--shape", shape, *more, ranks=ranks)


LOOP = Job("loop", SUPPORT / "train_again_sharded.py", LAYOUT)
LIGHTNING = Job("lightning", SUPPORT / "train_again_lightning_sharded.py", SHARDED, ("--stateless",))


@dataclass(frozen=True)
class Case:
    """A job with faults that are answered in place.

    Attributes:
        faults: KIND,RANK,STEP,PHASE of one in each incarnation.
        begun: the step that all begin with after each; lost: the completed steps that this costs.
        replica: another rank has the shard, too; if it has completed the step under way, all begin with that one.
    """

    job: Job
    faults: tuple[str, ...]
    shape: str = "plain"
    ranks: int = 2
    begun: tuple[int, ...] = (8,)
    lost: int = 0
    more: tuple[str, ...] = ()
    replica: bool = False

    def __str__(self) -> str:
        return " ".join((self.job.name, self.shape, str(self.ranks), *self.more, *self.faults))

    def check(self, folder: Path, undisturbed: Callable[..., Path]) -> None:
        """All processes stay but those of dead ranks, nothing is saved, and the job trains what it would have."""
        directory = folder / "d"
        kinds, ranks, steps, phases = zip(*(fault.split(",") for fault in self.faults), strict=True)
        faults = ";".join(
            f"kind={kind},rank={rank},step={step},phase={phase},incarnation={number}"
            for number, (kind, rank, step, phase) in enumerate(zip(kinds, ranks, steps, phases, strict=True))
        )
        variables = {"LASTGASP_HANG_TIMEOUT": "8"} if "sigstop" in kinds else {}
        command = self.job.command(directory, self.shape, self.ranks, *self.more)
        with disturbed(folder, command, faults, **variables) as started:
            pass
        found = incidents(directory)
        complete = self.replica and found[0].step_saved == self.begun[0] + 1
        begun = [step + complete for step in self.begun]
        assert [(one.ending, one.rung, one.step_saved, one.steps_lost) for one in found] == [
            ("in_place", "retry" if kind == "exception" else "replace", step, self.lost)
            for kind, step in zip(kinds, begun, strict=True)
        ], (found, started.output[-6000:])
        seen = [[(one.kind, str(one.rank)) for one in each.faults if one.kind != "peer"] for each in found]
        assert seen == [[(SEEN[kind], rank)] for kind, rank in zip(kinds, ranks, strict=True)], found
        for rank in range(self.ranks):
            entered = lines(directory, rank, "entered")
            assert [int(row[1]) for row in entered] == [0, *begun], started.output[-6000:]
            deaths = sum(kind != "exception" and int(who) == rank for kind, who in zip(kinds, ranks, strict=True))
            assert len({row[0] for row in entered}) == 1 + deaths
            assert lines(directory, rank, "ended") == [[entered[-1][0], "12"]]
        assert not list(directory.glob("gasp-*"))
        check_same(directory, undisturbed(self.job, self.shape, self.ranks), self.ranks)


def check_same(one: Path, other: Path, ranks: int) -> None:
    """The same weights, plain values, lines in the log and checkpoints of the framework's own."""
    assert differences(other / "final.pt", one / "final.pt") == []
    for rank in range(ranks):
        assert lines(one, rank, "seen") == lines(other, rank, "seen") != []
    assert {path.name for path in one.glob("*.ckpt")} == {path.name for path in other.glob("*.ckpt")}
    if (other / "logs").exists():
        assert logged.rows(one / "logs/table") == logged.rows(other / "logs/table") != []
