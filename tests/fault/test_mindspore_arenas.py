"""Real MindFormers jobs of which each rank holds a part that nobody else has: a killed rank costs no completed step.

MindSpore splits parameters itself (`parallel_mode: 1`) on Ascend and GPUs alone. Here an optimizer does, each
rank having the moments of its own part (support/mindspore/own_moments.py), in `parallel_mode: 3`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fault.test_mindspore_faults import LAST, STEP, check_losses, incidents, llama, run_with
from support.mindspore import place
from support.mindspore.job import LlamaJob

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]
SHARDED = {"parallel.parallel_mode": 3, "optimizer.type": "OwnMoments"}


def sharded(folder: Path, arena: str = "every 1") -> LlamaJob:
    """MindFormers with the flag in its YAML."""
    job = llama(folder)
    section = {"enable": True, "dir": str(folder / "ckpts"), "arena": arena}
    return replace(job, changes={**job.changes, **SHARDED, "lastgasp": section})


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[str]]:
    """Of the uninterrupted run."""
    return undisturbed(tmp_path_factory.mktemp("reference"))


def undisturbed(folder: Path, version: str = place.MAIN) -> dict[tuple[int, int], list[str]]:
    """Losses without lastgasp."""
    bare = LlamaJob(folder=folder, changes=SHARDED, version=version)
    finished = bare.run({"LASTGASP_FAULT": ""}, timeout=300)
    assert finished.returncode == 0, finished.output
    assert {step for _, step in bare.losses()} == set(range(1, LAST + 1))
    return bare.losses()


def check(
    folder: Path,
    losses: dict[tuple[int, int], list[str]],
    rank: int,
    phase: str,
    saved: int,
    version: str = place.MAIN,
) -> None:
    """The survivor writes the files of both, and the numbers go on as if nothing had been."""
    job = replace(sharded(folder), version=version)
    output = run_with(job, f"kind=sigkill,rank={rank},step={STEP},phase={phase}")
    (incident,) = incidents(folder)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", saved, 0), (incident, output)
    assert incident.savers == [1 - rank]
    check_losses(job, losses, saved)


def test_covering(tmp_path: Path, losses: dict[tuple[int, int], list[str]]) -> None:
    check(tmp_path, losses, 1, "forward", STEP)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "phase", "saved"),
    [
        (0, "forward", STEP),
        (1, "arena_copy", STEP),  # half of the copy of the next one
        (0, "after_update", STEP),
        (1, "step_end", STEP + 1),
        (0, "periodic_save", STEP + 1),
    ],
)
def test_rest(
    rank: int, phase: str, saved: int, tmp_path: Path, losses: dict[tuple[int, int], list[str]]
) -> None:
    """What one rank has not completed nobody has: then both shards are written from arenas."""
    check(tmp_path, losses, rank, phase, saved)


@pytest.mark.full
@pytest.mark.skipif(bool(place.missing(place.OLD)), reason=place.missing(place.OLD))
@pytest.mark.parametrize(("rank", "phase", "saved"), [(1, "forward", STEP), (0, "periodic_save", STEP + 1)])
def test_the_older_mindspore(rank: int, phase: str, saved: int, tmp_path: Path) -> None:
    for name in ("reference", "faulty"):
        (tmp_path / name).mkdir()
    check(tmp_path / "faulty", undisturbed(tmp_path / "reference", place.OLD), rank, phase, saved, place.OLD)
