"""A `.ckpt` is verified while the real MindSpore parses it: the same values, and none of a file that is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job
from support.mindspore import place
from support.mindspore.job import Job

SCRIPT = Path(place.__file__).parent / "preload_child.py"


@pytest.mark.skipif(bool(place.missing()), reason=place.missing())
def test_what_is_verified_is_what_is_loaded(tmp_path: Path) -> None:
    job = Job(folder=tmp_path, ranks=1, script=SCRIPT)
    (tmp_path / "ckpts").mkdir()
    command = [str(place.python()), str(SCRIPT), str(tmp_path / "ckpts")]
    finished = run_job(command, tmp_path / "log", timeout=250, environ=os.environ | job.environment())
    assert finished.returncode == 0, finished.output
    told = json.loads(finished.output.splitlines()[-1])
    assert told["whole"] == [[], True, True], "no damage, the same bits, given once"
    assert told["threads"] == [True, True, True]
    for where in ("first", "middle", "last"):
        assert told[where] == [True, True, False], f"{where}: refused, damage named, nothing given"
    assert told["put back"] is True
    assert told["other insides"] == [[], True], "left to MindSpore, verified all the same"
