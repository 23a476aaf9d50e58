"""The matrix of faults of hand-written loops, in place: each kind at each moment, and loops as frameworks have them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import candidates, verify
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.testing.weights import differences
from support.disturbed import disturbed, lines
from support.launchers import SUPPORT, incidents, undisturbed_jobs
from support.loop_matrix import FRAMEWORKS, MOMENTS, RANKS, LoopCase
from support.matrix import SAVE_STEP, STEP

WORKER = SUPPORT / "train_again_loops.py"
WAITS_THERE = ("gan", "after_update")
"""A loop that is done with its step there."""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]


def cases() -> list[LoopCase]:
    """Every kind at every moment on either rank, of two or three; of each shape some moments."""
    moments = [moment for moment in (*MOMENTS, "before_update", "step_end") if moment != "gasp_save"]
    plain = itertools.product(("sigkill", "exception", "sigstop"), moments, RANKS)
    shapes = [shape for shape in ("waiting", "adversary", "closure", *FRAMEWORKS) if shape != "unlike"]
    others = itertools.product(shapes, ("forward", "backward", "after_update"), ("sigkill", "exception"))
    return [LoopCase(*one, "run", 2 + n // 2 % 2) for n, one in enumerate(plain)] + [
        LoopCase(kind, moment, RANKS[n // 2 % 2], "run", shape=shape)
        for n, (shape, moment, kind) in enumerate(others)
        if (shape, moment) != WAITS_THERE
    ]


def job(case: LoopCase, directory: Path) -> list[str]:
    """Its command line."""
    found = case.command(directory, directory / "final.pt")
    [(place, script)] = [(place, Path(word)) for place, word in enumerate(found) if word.endswith(".py")]
    return [*found[:place], str(WORKER), script.stem, *found[place + 1 :]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault, by its number of ranks and shape."""

    def command(folder: Path, *key: Any) -> list[str]:
        return job(LoopCase("none", "none", "first", "run", *key), folder)

    return undisturbed_jobs(tmp_path_factory, command)


@pytest.mark.product("shape")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_each_fault_at_each_moment(case: LoopCase, tmp_path: Path, undisturbed: Any) -> None:
    directory, raised = tmp_path / "d", case.kind == "exception"
    hang = {"LASTGASP_HANG_TIMEOUT": "20"} if case.kind == "sigstop" else {}
    with disturbed(tmp_path, job(case, directory), case.faults, **hang) as started:
        pass
    where = started.output[-6000:]
    found = [(one.ending, one.rung, one.steps_lost) for one in incidents(directory)]
    assert found == [("in_place", "retry" if raised else "replace", 0)], (incidents(directory), where)
    entered = [lines(directory, rank, "entered") for rank in range(case.world)]
    begun = {tuple(int(step) for _, step in one) for one in entered}
    step = SAVE_STEP if case.moment == "periodic_save" else STEP
    assert len(begun) == 1 and begun < {(0, step), (0, step + 1)}, (entered, where)
    processes = [len({pid for pid, _ in one}) for one in entered]
    assert processes == [1 + (rank == case.victim and not raised) for rank in range(case.world)], (entered, where)
    assert differences(undisturbed(case.world, case.shape), directory / "final.pt") == [], where
    files = list(candidates([directory], LAYOUT))
    assert all(verify(one.path, LAYOUT).ok for one in files), where
    first = {4, 5} if case.moment == "periodic_save" else {4}  # what was cut short there is made with the next step
    assert {one.step for one in files} & first and {one.step for one in files} >= {8, 12}, where
    assert [path.name for path in directory.rglob("*") if ".tmp" in path.name or path.name.endswith(".corrupt")] == []
