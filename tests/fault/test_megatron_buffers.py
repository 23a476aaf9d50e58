"""Buffers that each data parallel rank of Megatron has for itself, behind real faults; a fault behind the last step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lastgasp.events import Incident, decode_incident
from support.megatron import place
from support.megatron.job import DIST_OPT, GptJob

STEP, LAST = 5, 8
CNN = Path(place.__file__).with_name("train_cnn.py")

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The buffers of both ranks at the end of a job without a fault."""
    job = _job(tmp_path_factory.mktemp("plain"))
    done = job.run()
    assert done.ok, done.output[-4000:]
    found = _buffers(job)
    assert found[0] != found[1], "ranks have none of their own"
    return found


@pytest.mark.parametrize(
    ("fault", "flags", "recovery", "lost"),
    [
        ("kind=exception,rank=0", "", "auto", ()),
        ("kind=exception,rank=0", "", "restart", ()),
        ("kind=sigkill,rank=1", "", "restart", (1,)),
        ("kind=sigkill,rank=1", DIST_OPT, "restart", ()),
    ],
    ids=["in place", "restarted", "killed", "killed, in an arena"],
)
def test_they_come_back_or_it_is_said(
    fault: str, flags: str, recovery: str, lost: tuple[int, ...], plain: list[str], tmp_path: Path
) -> None:
    job = replace(_job(tmp_path), launcher="run", launch_options=("--framework", "megatron"))
    job = replace(job, flags=f"{job.flags} {flags}")
    spec = f"{fault},step={STEP},phase=backward"
    done = job.run({"LASTGASP_FAULT": spec, "LASTGASP_RECOVERY": recovery})
    assert done.ok, done.output[-6000:]
    assert [rank for rank, found in enumerate(_buffers(job)) if found != plain[rank]] == list(lost)
    incident = _incident(job.checkpoints)
    assert incident.step_saved == STEP
    assert [note.startswith("rank 1: its module buffers (") for note in incident.notes] == [True] * len(lost)


def test_a_fault_in_the_last_evaluation_of_a_trained_job_does_not_end_it(tmp_path: Path) -> None:
    """The data set has no sample more: Megatron's sampler refuses to begin behind its end."""
    job = replace(_job(tmp_path), launcher="run", launch_options=("--framework", "megatron"), last=1000)
    job = replace(job, flags=f"{job.flags} --train-iters {LAST} --eval-iters 2")
    done = job.run({"LASTGASP_FAULT": f"kind=sigkill,rank=1,step={LAST - 1},phase=validation"})
    assert done.ok, done.output[-6000:]
    assert "no samples left" not in done.output and f"validation loss at iteration {LAST} on test set" in done.output
    assert len(list((job.checkpoints / "incidents").glob("*.json"))) == 1


def _job(folder: Path) -> GptJob:
    return GptJob(folder=folder, script=CNN, last=LAST)


def _buffers(job: GptJob) -> list[str]:
    return [(job.losses_folder / f"buffers-{rank}").read_text() for rank in range(job.ranks)]


def _incident(checkpoints: Path) -> Incident:
    (path,) = (checkpoints / "incidents").glob("*.json")
    return decode_incident(path.read_bytes())
