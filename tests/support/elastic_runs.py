"""Jobs that go on with fewer ranks and take the missing ones in again: how they are led past their gates."""

from __future__ import annotations

from pathlib import Path

from lastgasp.events import Incident
from lastgasp.testing.faults import read_log
from support.launchers import Running, incidents, running, until
from support.samples import entered
from support.train_elastic import GATES

OFFER = "a fault can be answered in place, as incarnation {}"
STOPS = "is to stop at the end of its step: missing ranks can be taken in"
"""What a rank says that waits at a gate meanwhile: it has to go on to that end by itself."""
QUIET = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug"}
TWICE = "kind=sigkill,rank=2,step=3,phase=backward;kind=sigkill,rank=0,step=6,phase={},incarnation=1"


def go(directory: Path, step: int, job: Running, incarnation: int) -> None:
    """Let the ranks pass a gate once the launcher can answer a fault in this incarnation."""
    until(lambda: OFFER.format(incarnation + 1) in job.output, f"incarnation {incarnation} can be answered")
    (directory / f"go-{step}").touch()


def faulted(folder: Path, command: list[str], directory: Path, faults: str, **variables: str) -> str:
    """A job that comes to its fault behind the first gate, and to its end. Returns its output."""
    variables |= {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(folder / "faults.log")}
    with running(folder, command, **QUIET | variables) as [started]:
        go(directory, GATES[0], started, 0)
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert started.code() == 0, started.output[-8000:]
        return str(started.output[-8000:])


def twice_fewer_and_all_again(
    folder: Path, command: list[str], directory: Path, phase: str
) -> tuple[str, list[Incident]]:
    """Four ranks, three, two without the one that logs, and four: the processes that live through it stay.

    Args:
        phase: in which the second one is killed.

    Returns:
        The job's output, and the incidents.
    """
    log = folder / "faults.log"
    variables = QUIET | {"LASTGASP_FAULT": TWICE.format(phase), "LASTGASP_FAULT_LOG": str(log)}
    with running(folder, command, **variables) as [started]:
        for incarnation, step in enumerate(GATES[:2]):
            go(directory, step, started, incarnation)
        until(lambda: entered(directory, 0)[-1:] and entered(directory, 0)[-1][1:] == (6, 0, 2), "two ranks are left")
        (directory / "grow").touch()
        until(lambda: started.output.count(STOPS) >= 2, "the others can be taken in")
        for step in GATES[2:]:
            (directory / f"go-{step}").touch()
        assert started.code() == 0, started.output[-8000:]
        where = str(started.output[-8000:])
    assert len(read_log(log)) == 2, where
    found = incidents(directory)
    told = [(one.rung, one.ending, one.steps_lost) for one in found]
    assert told == [("shrink", "in_place", 0), ("shrink", "in_place", 0), ("grow", "in_place", 0)], where
    rows = [[pid for pid, *_ in entered(directory, rank)] for rank in range(4)]
    assert rows[1][0] == rows[1][-1] and rows[3][0] == rows[3][-1], rows
    assert rows[0][0] != rows[0][-1] and rows[2][0] != rows[2][-1], rows
    return where, found
