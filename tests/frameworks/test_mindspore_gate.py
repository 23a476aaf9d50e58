"""The counters in the compiled step on the real MindSpore: what they call whole is whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job
from support.mindspore import place
from support.mindspore.job import Job

SCRIPT = Path(place.__file__).parent / "seqlock.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "version",
    [
        pytest.param(place.MAIN, marks=pytest.mark.skipif(bool(place.missing()), reason=place.missing())),
        pytest.param(
            place.OLD,
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(bool(place.missing(place.OLD)), reason=place.missing(place.OLD)),
            ],
        ),
    ],
)
def test_what_the_counters_call_complete_is_complete(version: str, tmp_path: Path) -> None:
    """Thousands of readings by a second thread, against what the training thread sees at the end of each step."""
    job = Job(folder=tmp_path, ranks=1, version=version, script=SCRIPT)
    command = [str(place.python(version)), str(SCRIPT)]
    finished = run_job(command, tmp_path / "log", timeout=250, environ=os.environ | job.environment())
    assert finished.returncode == 0, finished.output
    told = json.loads(finished.output.splitlines()[-1])
    assert told["wrong"] == 0, told
    assert told["torn"] > 0, "the graph was never read in the middle of an update: the test proves nothing"
    assert told["whole"] > 100 and told["steps"] > 10, told
    assert told["counted"] == [60, 60]
    assert told["ours"] == [], "counters must be in no checkpoint"
    assert told["undone"] is True
