"""Between the end of a step and the next one a save of the framework's own may be under way: a gasp waits for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job
from support.mindspore import place
from support.mindspore.job import Job

SCRIPT = Path(place.__file__).parent / "callbacks_child.py"


@pytest.mark.slow
@pytest.mark.skipif(bool(place.missing()), reason=place.missing())
def test_a_gasp_waits_while_the_framework_may_be_saving(tmp_path: Path) -> None:
    job = Job(folder=tmp_path, ranks=1, version=place.MAIN, script=SCRIPT)
    command = [str(place.python(place.MAIN)), str(SCRIPT), str(tmp_path / "ckpts")]
    finished = run_job(command, tmp_path / "log", timeout=250, environ=os.environ | job.environment())
    assert finished.returncode == 0, finished.output
    told = json.loads(finished.output.splitlines()[-1])
    assert told["begins"] == [12, 3, 4], "as CheckpointMonitor names the last step of an epoch"
    assert told["pynative"] == [12, 3, 4]
    assert told["sinks"] == [3, 3, 3, 4]
    assert told["pynative again"] == {"checkpoint_path": "x"}, "a second training is left alone"
    assert told["scale"] == [None, None, 8.0, 4.0, None, None], "what a user's network returns costs no training"
    assert told["others"] == [13, True]
    assert (told["over"], told["end"], told["ended"], told["raised"]) == (False, True, False, False)
    assert told["second"] == ["LossMonitor", "Later"], "the LastGasp of the first training has no session any more"
    weights, moments, means = told["digests"][:2], told["digests"][2:4], told["digests"][4:6]
    assert (weights, moments) == ([True, False], [True, False])
    assert means == [True, True], "statistics of batch norm are a rank's own"
    assert told["digests"][6:] == [True, False], "bfloat16"
    assert told["compared"] == 2, "before the first step, and behind it"
    alone, parallel, semi = (told["holders"][mode] for mode in ("stand_alone", "data_parallel", "semi_auto_parallel"))
    assert (alone[0], parallel[0], semi[0]) == ([[0], [1]], [[0, 1]], [[0], [1]])
    assert "model of its own" in alone[1]
    assert "costs no step" in parallel[1]
    assert all("NOT SAVED: a rank that is killed" in mode[1] for mode in (alone, semi))
