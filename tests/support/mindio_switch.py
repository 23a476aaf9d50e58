"""Jobs of a loop of which MindX moves one rank to another node (hot switch), and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lastgasp.testing.weights import differences
from support import mindx
from support.launchers import SUPPORT, Running, incidents, running, until
from support.recovery_backends import Trace

WORKER = SUPPORT / "train_again.py"
GATE, SWITCHED, RANK = 5, 6, 1
"""All wait behind step 5 while the new process of rank 1 comes, and leave their loop at the end of step 6."""
POD = {
    "HIGH_AVAILABILITY": "dump,recover", "LASTGASP_TOKEN": "the secret of this test's job",
    "LASTGASP_BIND": mindx.HOST, "LASTGASP_WARM": "off", "TESTS_UNTIL_KEPT": "1",
}  # fmt: skip
ORDERS = ("stop", "clean", "rebuild_group", "repair", "rollback", "save_ckpt")


@contextmanager
def prepared(
    tmp_path: Path,
    trace: Trace,
    how: str,
    more: Mapping[str, str] | None = None,
    waits: bool = True,
    stops: bool = False,
    script: Path = WORKER,
) -> Iterator[Running]:
    """A job of three ranks at the gate, beside which a new process of rank 1 waits, or is about to.

    Args:
        how: the old pod is deleted (`mindx.OLD_POD`). more: of its environment. stops: it is stopped at once.
        script: trains.
    """
    directory = tmp_path / "d"
    directory.mkdir()
    if stops:
        (directory / "stop").touch()
    final = ["--final", directory / "final.pt"] if script == WORKER else []
    command = mindx.command(script, "--dir", directory, *final, ranks=3)
    variables = {mindx.SWITCH: str(directory), mindx.OLD_POD: how, **POD, **(more or {})}
    with running(tmp_path, command, **variables) as [started]:
        until(lambda: at_gate(trace) == {0, 1, 2}, "all are at the gate")
        (directory / "switch").write_text(str(RANK))
        until(lambda: "a switch is prepared: 0" in started.output, "MindX has ordered the switch")
        if waits:
            until(lambda: len(trace.events("report", RANK)) == 1, "the new process waits")
            [waiting] = trace.events("report", RANK)
            assert waiting["state"] == "RS_PREREPAIR_FINISH"
        yield started


def at_gate(trace: Trace) -> set[int]:
    """The ranks that MindIO knows there."""
    return {event["of"] for event in trace.events("heard") if event["step"] == GATE}


def words(directory: Path, rank: int) -> list[list[str]]:
    """What processes of this rank have noted."""
    path = directory / f"rank-{rank}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def trained(directory: Path, rank: int) -> list[int]:
    """Each step that a process of this rank has begun."""
    return [int(line[2]) for line in words(directory, rank) if line[0] == "trained"]


def entered(directory: Path, rank: int) -> list[tuple[int, int]]:
    """Process and step of each entry."""
    return [(int(line[1]), int(line[2])) for line in words(directory, rank) if line[0] == "entered"]


def pids(trace: Trace) -> list[int]:
    """The processes of the rank that is moved: the old one, and the new one."""
    return [event["pid"] for event in trace.events("init_processor", RANK)]


def check_moved(directory: Path, undisturbed: Path, trace: Trace) -> None:
    """One rank has a new process, each step was trained once by each rank, nothing was saved or lost."""
    for rank in range(3):
        [(pid, first), (after, then)] = entered(directory, rank)
        assert (first, then, pid != after) == (0, SWITCHED, rank == RANK)
        assert trained(directory, rank) in (list(range(12)), [])  # Lightning's script does not note them
        orders = ["rebuild_group", *(["repair"] if rank in (RANK, RANK + 1) else []), "rollback"]
        assert [name for name in trace.names(rank) if name in ORDERS] == orders
    assert differences(undisturbed, directory / "final.pt") == []
    assert len(list(directory.glob("*.pt"))) == 1 and list(directory.glob("gasp-*")) == []
    [incident] = incidents(directory)
    ended = (incident.ending, incident.rung, incident.step_saved, incident.steps_lost, incident.led_by)
    assert ended == ("in_place", "replace", SWITCHED, 0, "MindIO in TaskD"), incident
    assert {fault.rank for fault in incident.faults} == {RANK}
    assert "MindIO in TaskD has moved rank 1 to another node (hot switch)" in incident.notes


def check_undisturbed(directory: Path, undisturbed: Any) -> None:
    """Nobody has left the training."""
    assert [len(entered(directory, rank)) for rank in range(3)] == [1, 1, 1]
    assert incidents(directory) == [] and differences(undisturbed, directory / "final.pt") == []
