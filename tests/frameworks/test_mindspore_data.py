"""Real MindSpore resumes over other training data: it goes on, as MindSpore lets it, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.mindspore import place
from support.mindspore.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(place.missing()), reason=place.missing())]

OTHER = "the training data are not those of the checkpoint"
STAGES = "BatchDataset of NumpySlicesDataset"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_resume_over_other_data_says_so(tmp_path: Path) -> None:
    own = ["--lastgasp", str(tmp_path / "d"), "--save", str(tmp_path / "saves"), "--every", "4"]
    said = []
    for steps, epochs in ((8, 1), (8, 2), (4, 6)):
        job = Job(folder=tmp_path, ranks=1, arguments=[*own, "--steps", str(steps), "--epochs", str(epochs)])
        done = job.run()
        assert done.returncode == 0, done.output[-4000:]
        said.append(done.output)
    assert [OTHER in output for output in said] == [False, False, True], said[1][-4000:]
    assert f"{OTHER}: 8 batches of 16 ({STAGES}) there, 4 batches of 16 ({STAGES}) here" in said[2]
    assert job.steps(0) == [list(range(1, 9)), list(range(9, 17)), list(range(17, 25))], "each step once"
