"""Jobs of ranks that TaskD has go on with fewer, and with all of them again, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lastgasp.events import Incident
from lastgasp.testing.weights import differences
from support import logged, mindx
from support.again_faults import AFTER, VARIABLE
from support.launchers import SUPPORT, Running, finish, incidents, running, torchrun, until
from support.recovery_backends import TORCH, Backend, Trace, used
from support.samples import check_samples, entered
from support.train_elastic import GATES

POD = {
    "HIGH_AVAILABILITY": "dump,elastic-training", "LASTGASP_TOKEN": "the secret of this test's job",
    "LASTGASP_BIND": mindx.HOST, "LASTGASP_WARM": "off",
}  # fmt: skip
KILLED = "kind=sigkill,rank=3,step=3,phase=backward"
SURVIVOR = ["stop", "clean", "zit_downgrade_rebuild"]
GROWN = ["zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback"]
SOON = {"TTP_NORMAL_ACTION_TIME_LIMIT": "60"}
"""Scaled: an order that nobody answers is given up after twelve seconds."""
GATE = 6
"""The step behind which ranks wait until the missing one is there again."""


def gates(directory: Path) -> None:
    """No rank waits at any."""
    directory.mkdir(exist_ok=True)
    for step in GATES:
        (directory / f"go-{step}").touch()


def check_bits(directory: Path, undisturbed: Path) -> None:
    """The job has used the samples of the other one, each once, and has its weights to the bit."""
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


def check_fit(directory: Path, undisturbed: Path) -> None:
    """The same of a fit of Lightning's, which has logged each step once, with the same numbers, in one version."""
    check_bits(directory, undisturbed)
    check_logs(directory, undisturbed)


def checkpoints(directory: Path) -> list[str]:
    """What ModelCheckpoint has left."""
    return sorted(path.name for path in directory.glob("logs/**/*.ckpt"))


def check_logs(directory: Path, undisturbed: Path) -> None:
    """Each step is in the log once, with the same numbers, and ModelCheckpoint has left the same files."""
    assert logged.versions(directory / "logs") == ["version_0"]
    assert checkpoints(directory) == checkpoints(undisturbed) != []
    ours, theirs = logged.rows(directory / "logs/table"), logged.rows(undisturbed / "logs/table")
    assert [sorted(row) for row in ours] == [sorted(row) for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        for name, value in one.items():
            assert float(value) == pytest.approx(float(other[name]), rel=1e-5), (name, one, other)


@dataclass(frozen=True)
class Trained:
    """What trains.

    Args:
        same: raises unless a job's directory shows what that of an undisturbed one shows.
        more: its further arguments under TaskD. variables: of its environment there.
    """

    script: Path
    same: Callable[[Path, Path], None]
    more: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 4

    def words(self, directory: Path) -> list[Any]:
        """Its first arguments."""
        return ["--dir", directory, *(["--final", directory / "final.pt"] if self.same is check_bits else [])]

    def job(self, directory: Path, script: Path | None = None) -> list[str]:
        """Under TaskD; no rank waits."""
        gates(directory)
        return mindx.command(script or self.script, *self.words(directory), *self.more, ranks=self.ranks)

    def environment(self, directory: Path) -> dict[str, str]:
        """Of the job."""
        return {**POD, **self.variables}

    def saves(self, directory: Path) -> Path:
        """Where it saves."""
        return directory

    def entered(self, directory: Path, rank: int) -> list[tuple[int, int, int, int]]:
        """As `samples.entered`."""
        return entered(directory, rank)

    def check_told(self, directory: Path, *told: Incident) -> None:
        """All was handed over in memory: nothing was saved, and each incident has the digest of all samples so far."""
        assert list(directory.glob("gasp-*")) == []
        assert all(any("digest" in note for note in one.notes) for one in told), told

    def check_dumped(self, incident: Incident, step: int) -> None:
        """It was."""
        assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", step, 0), incident

    def second(self, directory: Path) -> bool:
        """There was a second fault."""
        return (directory / "second").exists()

    def undisturbed(self, folder: Path) -> Path:
        """The directory of a job without a fault, on our own engine."""
        gates(folder)
        command = torchrun(self.script, *self.words(folder), ranks=self.ranks)
        assert finish(command, folder, LASTGASP_WARM="off", LASTGASP_BACKEND="embedded").ok
        return folder

    def shrunk(
        self, leader: Backend, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, lost: int
    ) -> None:
        """One rank is lost: the others keep their processes and get numbers without a gap; nothing is saved."""
        directory = tmp_path / "d"
        fault = KILLED.replace("rank=3", f"rank={lost}")
        with used(leader, tmp_path, monkeypatch) as trace:
            command = self.job(directory)
            done = finish(command, tmp_path, LASTGASP_FAULT=fault, **self.environment(directory))
            assert done.ok, done.output[-8000:]
            if leader is TORCH:
                check_orders(trace, lost)
        left = [rank for rank in range(4) if rank != lost]
        for number, rank in enumerate(left):
            [(pid, *first)], [(same, *then)] = self.entered(directory, rank)[:1], self.entered(directory, number)[-1:]
            assert (first, then, same) == ([0, rank, 4], [3, number, 3], pid)
        [incident] = incidents(self.saves(directory))
        ended = (incident.ending, incident.rung, incident.step_saved, incident.steps_lost, incident.led_by)
        assert ended == ("in_place", "shrink", 3, 0, "MindIO in TaskD"), incident
        assert [fault.rank for fault in incident.faults] == [lost]
        note = f"MindIO in TaskD goes on without rank {lost}: training goes on with 3 of 4 ranks"
        assert note in incident.notes
        self.check_told(directory, incident)
        self.same(directory, undisturbed)

    def second_fault(
        self, leader: Backend, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, step: int,
        **more: str,
    ) -> None:  # fmt: skip
        """The job, whose last incident must be that the step was dumped; afterwards all four ranks train on."""
        directory = tmp_path / "d"
        variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log")} | SOON | more
        with used(leader, tmp_path, monkeypatch):
            command = self.job(directory)
            done = finish(command, tmp_path, **self.environment(directory) | variables)
            assert done.ok, done.output[-8000:]
        *earlier, incident = incidents(self.saves(directory))
        assert [one.rung for one in earlier] in ([], ["shrink"]), earlier
        self.check_dumped(incident, step)
        assert VARIABLE not in more or self.second(directory)
        self.same(directory, undisturbed)

    def scaled_out(
        self, tmp_path: Path, trace: Trace, more: Mapping[str, str], script: Path | None = None, wanted: str = "stop"
    ) -> Running:
        """The job, in which a rank is killed, and replaced when the others have come to the gate.

        They wait there until they are stopped, or until there was a second fault. `script`: a copy of the job's, which
        is edited for the new process.
        """
        directory, back = tmp_path / "d", tmp_path / "back"
        command = self.job(directory, script)
        (directory / f"go-{GATE}").unlink()
        variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log"), AFTER: str(back)}
        variables |= {mindx.SCALE_OUT: str(back), **self.environment(directory), **more}
        with running(tmp_path, command, **variables) as [started]:
            until(lambda: [event for event in trace.events("heard") if event["step"] == GATE], "they come to the gate")
            if script is not None:
                script.write_bytes(script.read_bytes() + b"# edited\n")
            back.touch()
            until(
                lambda: {"stop": len(trace.events("stop", 0)) == 2, "second": self.second(directory)}[wanted],
                "the ranks are stopped for the new one, or that has ended",
            )
            (directory / f"go-{GATE}").touch()
            assert started.code() == 0, started.output[-8000:]
        return started

    def taken_in(self, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, lost: list[int]) -> None:
        """Four ranks, fewer, and four: new processes take the step from ranks that are there, which keep their own."""
        fault = ";".join(KILLED.replace("rank=3", f"rank={rank}") for rank in lost)
        with used(TORCH, tmp_path, monkeypatch) as trace:
            self.scaled_out(tmp_path, trace, {"LASTGASP_FAULT": fault})
            [up] = trace.events("upgraded")
            assert (up["taken_in"], up["step"]) == (lost, GATE)
            for rank in range(self.ranks):
                orders = [name for name in trace.names(rank) if name in (*SURVIVOR, *GROWN, "repair", "save_ckpt")]
                before = [] if rank in lost else [*SURVIVOR, "stop", "clean"]
                gives = rank in {next(r for r in (one + 1, one + 2) if r not in lost) % self.ranks for one in lost}
                assert orders == before + [name for name in GROWN if name != GROWN[1] or gives or rank in lost]
        self.check_grown(tmp_path / "d", undisturbed, lost)

    def check_grown(self, directory: Path, undisturbed: Path, lost: list[int]) -> None:
        """All processes that trained have stayed, each number is that of the beginning; nothing was saved or lost."""
        for rank in range(self.ranks):
            rows = [row for row in self.entered(directory, rank) if row[3] == self.ranks]
            assert [row[1:3] for row in rows] == [(0, rank), (GATE, rank)], rows
            assert (rows[0][0] == rows[1][0]) == (rank not in lost), rows
        shrunk, grown = incidents(self.saves(directory))
        told = (shrunk.rung, shrunk.ending, shrunk.step_saved, shrunk.steps_lost)
        assert told == ("shrink", "in_place", 3, 0), shrunk
        ended = (grown.rung, grown.ending, grown.step_saved, grown.steps_lost, grown.led_by, grown.faults)
        assert ended == ("grow", "in_place", GATE, 0, "MindIO in TaskD", []), grown
        taken = f"takes in {len(lost)} of {self.ranks} ranks, which were missing: training goes on with all of them"
        assert f"MindIO in TaskD {taken}" in grown.notes, grown.notes
        self.check_told(directory, shrunk, grown)
        self.same(directory, undisturbed)

    def dumped(self, tmp_path: Path, undisturbed: Path, step: int = GATE) -> None:
        """The last incident says that the step was saved; then all four ranks have trained on with it."""
        shrunk, *grown, last = incidents(self.saves(tmp_path / "d"))
        assert (shrunk.rung, shrunk.steps_lost) == ("shrink", 0) and [one.rung for one in grown] in ([], ["grow"])
        self.check_dumped(last, step)
        self.same(tmp_path / "d", undisturbed)

    def dumped_on_the_way_back(
        self, second: str, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`second` is a fault while ranks are taken in."""
        with used(TORCH, tmp_path, monkeypatch) as trace:
            fault = KILLED.replace("rank=3", f"rank={lost}")
            self.scaled_out(tmp_path, trace, {VARIABLE: second, "LASTGASP_FAULT": fault} | SOON)
        assert self.second(tmp_path / "d")
        self.dumped(tmp_path, undisturbed)


def check_orders(trace: Trace, lost: int) -> None:
    """MindIO's order on each rank that is left; nobody is saved, repaired or rolled back."""
    left = [rank for rank in range(4) if rank != lost]
    for rank in left:
        orders = [name for name in trace.names(rank) if name in (*SURVIVOR, "repair", "rollback", "save_ckpt")]
        assert orders == SURVIVOR
        assert [event["state"] for event in trace.events("report", rank)] == ["RS_NORMAL"]
        [order] = trace.events("zit_downgrade_rebuild", rank)
        assert order["given"] == [left, left] and order["thread"] == "_DummyThread"
    [down] = trace.events("downgraded")
    assert down["isolated"] == [lost]


LOOP = Trained(SUPPORT / "train_elastic.py", check_bits)
FIT = Trained(
    SUPPORT / "train_elastic_lightning.py", check_fit, more=("--nodes", "4"), variables={"LASTGASP_RECOVERY": "auto"}
)
