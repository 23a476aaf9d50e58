"""examples/mindspore_resnet as its README says: killed and resumed, the weights of a run that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log
from support.mindspore import place
from support.mindspore.job import REPOSITORY, Job

TRAIN = REPOSITORY / "examples/mindspore_resnet/train.py"
FAULT = 33

pytestmark = [
    pytest.mark.full,
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def job(folder: Path) -> Job:
    """Two ranks under `lastgasp run`."""
    given = ("--dir", str(folder / "ckpts"), "--final", str(folder / "final.ckpt"))
    return Job(folder=folder, launcher="run", script=TRAIN, arguments=given)


def test_killed_and_resumed_the_weights_are_equal(tmp_path: Path) -> None:
    whole, broken = job(tmp_path / "whole"), job(tmp_path / "broken")
    done = whole.run(timeout=250)
    assert done.ok, done.output[-4000:]
    fired = tmp_path / "fired"
    kill = {"LASTGASP_FAULT": f"kind=sigkill,rank=1,step={FAULT},phase=forward", "LASTGASP_FAULT_LOG": str(fired)}
    done = broken.run(kill, timeout=250)
    assert len(read_log(fired)) == 1, done.output[-4000:]
    assert done.ok, done.output[-4000:]
    (record,) = (broken.folder / "ckpts/incidents").glob("*.json")
    incident = decode_incident(record.read_bytes())
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", FAULT, 0)
    final = [(run.folder / "final.ckpt").read_bytes() for run in (whole, broken)]
    assert final[0] == final[1]
