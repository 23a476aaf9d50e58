"""The pynative Trainer of MindFormers: the real one of 1.9.0, which trains in one process (mindformers.md §8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.exitcodes import SAVED
from lastgasp.testing.corrupt import flip_bit
from lastgasp.testing.faults import read_log
from support.mindspore import place
from support.mindspore.job import HERE, Job

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]
LAST = 20


def job(folder: Path, shape: str = "1") -> Job:
    """One training of `LAST` steps in epochs of 12, a checkpoint every 5, with lastgasp's section in its config."""
    given = (str(folder / "ckpt"), str(LAST), shape)
    return Job(folder=folder, ranks=1, launcher="start", script=HERE / "train_pynative.py", arguments=given)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], list[str]]:
    """Losses of a training that nothing happened to, and without lastgasp."""
    reference = job(tmp_path_factory.mktemp("reference"))
    done = reference.run({"LASTGASP": "0"})
    assert done.ok, done.output[-4000:]
    assert not list((reference.folder / "ckpt").glob("*.manifest.json")), "LASTGASP=0 is off"
    return reference.losses()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "saved"), [pytest.param("exception", 13, marks=pytest.mark.full), ("sigterm", None)]
)
def test_the_step_is_saved_and_the_losses_stay_the_same(
    kind: str, saved: int | None, tmp_path: Path, expected: dict[tuple[int, int], list[str]]
) -> None:
    struck, fired = job(tmp_path), tmp_path / "fired"
    fault = f"kind={kind},rank=0,step=13,phase=forward"
    done = struck.run({"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(fired)})
    assert len(read_log(fired)) == 1, done.output[-4000:]
    assert done.returncode == (SAVED if kind == "sigterm" else 1), done.output[-4000:]
    incident = only_incident(tmp_path / "ckpt")
    assert (incident.ending, incident.steps_lost) == ("saved", 0)
    assert incident.step_saved == saved or (saved is None and incident.step_saved in (13, 14))
    again = struck.run()
    assert again.ok, again.output[-4000:]
    first, second = struck.steps(0)
    assert second[0] == first[-1] + 1 == (incident.step_saved or 0) + 1
    assert struck.losses() == expected


@pytest.mark.full
def test_a_trainer_of_the_shape_of_2_0(tmp_path: Path, expected: dict[tuple[int, int], list[str]]) -> None:
    """A contract test: 2.0.0 itself needs hyper_parallel, which is on no package index (mindformers.md §0)."""
    struck, fired = job(tmp_path, "2"), tmp_path / "fired"
    done = struck.run(
        {"LASTGASP_FAULT": "kind=exception,rank=0,step=7,phase=forward", "LASTGASP_FAULT_LOG": str(fired)}
    )
    assert len(read_log(fired)) == 1, done.output[-4000:]
    assert only_incident(tmp_path / "ckpt").step_saved == 7
    again = struck.run()
    assert again.ok, again.output[-4000:]
    assert struck.losses() == expected


@pytest.mark.full
def test_a_damaged_checkpoint_of_the_trainers_own_is_not_trained_on(
    tmp_path: Path, expected: dict[tuple[int, int], list[str]]
) -> None:
    """Today the flipped bit loads without a word (mindformers.md §5)."""
    struck = job(tmp_path)
    done = struck.run({"LASTGASP_FAULT": "kind=sigkill,rank=0,step=11,phase=step_end"})
    assert done.returncode == -9, done.output[-4000:]
    flip_bit(tmp_path / "ckpt/iteration_00000010/checkpoint-model-0000000-0000001.safetensors", 1000)
    again = struck.run()
    assert again.ok, again.output[-4000:]
    assert struck.steps(0)[1][0] == 6, "it goes on from iteration 5"
    assert "iteration_00000010" in again.output and "was not used" in again.output
    assert {key: losses[-1] for key, losses in struck.losses().items()} == {k: v[0] for k, v in expected.items()}
    standing = candidates([tmp_path / "ckpt"], DirectoryLayout("iteration_*"))
    assert standing
    assert all(verify(c.path, DirectoryLayout("iteration_*")).ok for c in standing)


def only_incident(directory: Path) -> Incident:
    """The one that is recorded."""
    (path,) = (directory / "incidents").glob("*.json")
    return decode_incident(path.read_bytes())
