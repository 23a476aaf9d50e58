"""A second fault at each point of a recovery in place: no step is lost, same numbers, nobody trains a rank twice.

It is a kill of a rank or of the launcher, or a hang: a rank is stopped (SIGSTOP).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.steps.recover import recover_orphans
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import again_faults, lean
from support.again_faults import HUNG, LIMITS
from support.launchers import SUPPORT, incidents, running, torchrun, undisturbed_jobs, until

RANKS = 3
READY = "a restart will fork its ranks from a warm process"
KILLED_1 = "kind=sigkill,rank=1,step=8,phase=backward"
KILLED_0 = "kind=sigkill,rank=0,step=8,phase=backward"
RAISED_1 = "kind=exception,rank=1,step=8,phase=backward"
LATER = ("joining", "function called", "group made", "handover", "state taken", "first step", "first update")
"""Points of a rank that follow the order to enter the training again."""
GONE = "was saved: a resume will not be bit-equal"
EARLIER = ("step left", "released", "state kept")

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


def matrix() -> list[Any]:
    """First fault, point, who comes there, who is killed then."""
    cases: list[tuple[str, str, str, str]] = []
    firsts = (KILLED_1, ("0", "2"), ("1",)), (KILLED_0, ("2",), ("0",)), (RAISED_1, ("0", "1"), ())
    for first, survivors, new in firsts:
        for point, rank in itertools.product(EARLIER, survivors):
            cases += [(first, point, rank, victim) for victim in ("self", "launcher")]
        for point, rank in itertools.product(LATER, survivors + new):
            if (point, rank) != ("joining", *new):  # a new process has nothing to join with before its session
                cases += [(first, point, rank, "self")]
        cases += [(first, point, survivors[0], "launcher") for point in LATER]
        cases += [(first, "verdict", "launcher", victim) for victim in (*survivors, "launcher")]
        cases += [(first, "fork", "launcher", victim) for victim in (*survivors, "launcher")] if new else []
    cases += [(*case[:3], case[3] + HUNG) for case in cases if case[3] != "launcher"]
    return [pytest.param(*case, id=_name(*case), marks=() if case in COVERING else pytest.mark.full) for case in cases]


def _name(first: str, point: str, who: str, victim: str) -> str:
    fault = {KILLED_1: "1 killed", KILLED_0: "0 killed", RAISED_1: "1 raised"}[first]
    victim, _, hung = victim.partition(",")
    return f"{fault}, {point} of {who}, {victim} {'hung' if hung else 'killed'}"


COVERING = (
    (KILLED_1, "fork", "launcher", "0"),
    (KILLED_0, "group made", "0", "self"),
    (RAISED_1, "first step", "0", "self"),
    (KILLED_0, "state kept", "2", "launcher"),
)
"""Each first fault and each kind of victim once: a survivor, the new process, the launcher."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Final weights of the job without a fault."""

    def command(folder: Path) -> list[str]:
        return torchrun(SUPPORT / "train_again.py", "--dir", folder, "--final", folder / "final.pt", ranks=RANKS)

    return undisturbed_jobs(tmp_path_factory, command)()


@pytest.fixture
def later_launcher() -> Iterator[None]:
    """Afterwards does what the next launcher on this machine does, minutes later: the step marks of the dead."""
    yield
    recover_orphans()


def test_the_matrix_is_whole() -> None:
    assert len({_name(*case.values) for case in matrix()}) == len(matrix())
    assert sum(not case.marks for case in matrix()) == len(COVERING)


@pytest.mark.product("point")
@pytest.mark.parametrize(("first", "point", "who", "victim"), matrix())
def test_no_step_is_lost(
    first: str, point: str, who: str, victim: str, tmp_path: Path, undisturbed: Path, later_launcher: Any
) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    variables = {
        again_faults.VARIABLE: f"{point},{who},{victim}", "LASTGASP_FAULT": first, "LASTGASP_LOG": "debug",
        "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log"),
    } | (LIMITS if victim.endswith(HUNG) else {})  # fmt: skip
    output = job(tmp_path, directory, LASTGASP_WARM="auto", **variables)
    if victim == "launcher" and not ended(directory):  # ranks that were past their joining train to the end without it
        output += job(tmp_path, directory, **variables | {"LASTGASP_WARM": "off", "LASTGASP_FAULT": ""})
    assert (directory / "second").exists(), output[-8000:]
    assert len(read_log(tmp_path / "faults.log")) == 1
    check(directory, output)
    if victim.endswith(HUNG):
        hung = int(who if victim == "self" + HUNG else victim.partition(",")[0])
        check_spared(directory, first, hung, output)
    if GONE in output:  # the launcher has died with the dead rank's buffer, before it told the others what is in it
        assert victim == "launcher" and first != RAISED_1 and point in ("verdict", "fork", *EARLIER), output[-8000:]
    else:
        assert differences(undisturbed, directory / "final.pt") == [], output[-8000:]


def job(folder: Path, directory: Path, **variables: str) -> str:
    """One launcher to its end, which may be a kill; returns what it and its ranks have written."""
    worker = [SUPPORT / "train_again.py", "--dir", directory, "--final", directory / "final.pt"]
    launcher = [lean.python(), SUPPORT / "again_faults.py", directory, "run", "--nproc-per-node", RANKS, *worker]
    killed = variables[again_faults.VARIABLE].endswith(",launcher") and not (directory / "second").exists()
    with running(folder, [str(word) for word in launcher], **variables) as [started]:
        if variables["LASTGASP_WARM"] == "auto":
            until(lambda: READY in started.output, "the warm process is ready")
        (directory / "go").touch()
        assert started.code() == (-9 if killed else 0), started.output[-8000:]
    return started.output


def ended(directory: Path) -> bool:
    """All ranks have trained to the end."""
    return all(re.search(r"^ended \d+ 12$", _lines(directory, rank), re.M) for rank in range(RANKS))


def _lines(directory: Path, rank: int) -> str:
    return (directory / f"rank-{rank}").read_text()


def check(directory: Path, output: str) -> None:
    """Every start after the fault began with the step of the fault, and one process at a time trained each rank."""
    assert all(not incident.steps_lost for incident in incidents(directory)), (incidents(directory), output[-8000:])
    for rank in range(RANKS):
        rows = [line.split() for line in _lines(directory, rank).splitlines()]
        begun = [int(row[2]) for row in rows if row[0] == "entered"]
        assert begun[0] == 0
        assert all(step in (8, 9) for step in begun[1:]), (rows, output[-8000:])
        pids = [row[1] for row in rows if row[0] == "trained"]
        assert len([pid for pid, _ in itertools.groupby(pids)]) == len(set(pids)), rows


def check_spared(directory: Path, first: str, hung: int, output: str) -> None:
    """The hung rank alone is said to hang. Nobody but it and a killed one gets a new process, or the job restarts."""
    found = incidents(directory)
    hangs = {fault.rank for one in found for fault in one.faults if fault.kind == "hang"}
    assert hangs == {hung}, (found, output[-8000:])
    if all(one.ending == "in_place" for one in found):
        for rank in set(range(RANKS)) - {hung, {KILLED_0: 0, KILLED_1: 1}.get(first, hung)}:
            pids = {line.split()[1] for line in _lines(directory, rank).splitlines()}
            assert len(pids) == 1, (rank, found, output[-8000:])
