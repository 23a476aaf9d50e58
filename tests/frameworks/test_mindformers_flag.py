"""The flag in the YAML is all: plain msrun, nobody imports lastgasp, and the next start goes on from the step saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log
from support.mindspore import installed, place
from support.mindspore.job import Job, LlamaJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fault,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@pytest.mark.full
@pytest.mark.parametrize("flag", ["lastgasp", "callbacks"])
def test_the_flag_is_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setenv(place.INSTEAD[place.MAIN], str(installed.make(tmp_path / "env")))
    changes = {"lastgasp": {"enable": True}} if flag == "lastgasp" else {"callbacks.-": {"type": "LastGasp"}}
    job = LlamaJob(folder=tmp_path / "job", changes=changes)
    (tmp_path / "job").mkdir()
    fault = {
        "LASTGASP_FAULT": "kind=exception,rank=1,step=10,phase=after_update",
        "LASTGASP_FAULT_LOG": str(tmp_path / "faults"),
    }
    first = job.run(fault)
    assert first.returncode != 0 and first.left == (), first.output[-4000:]
    assert [fired["rank"] for fired in read_log(tmp_path / "faults")] == [1]
    (record,) = (tmp_path / "job/output/incidents").glob("*.json")
    incident = decode_incident(record.read_bytes())
    assert (incident.ending, incident.step_saved) == ("saved", 11), incident
    second = job.run()
    assert second.returncode == 0 and second.left == (), second.output[-4000:]
    for rank in (0, 1):
        assert job.steps(rank)[1:] == [list(range(12, 17))]
    plain = LlamaJob(folder=tmp_path / "plain")
    (tmp_path / "plain").mkdir()
    assert plain.run({"LASTGASP": "0"}).returncode == 0
    wanted = {step: losses[0] for (_, step), losses in plain.losses().items()}
    assert {step: losses[-1] for (_, step), losses in job.losses().items() if step > 11} == {
        step: loss for step, loss in wanted.items() if step > 11
    }


@pytest.mark.full
@pytest.mark.parametrize("more", [(), ("--fit",)], ids=["train", "fit"])
def test_the_environment_is_all_for_plain_mindspore(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Nobody makes a LastGasp; one process, which saves its own step and is started again."""
    job = Job(folder=tmp_path / "job", ranks=1, launcher="run", arguments=more)
    bare = Job(folder=tmp_path / "bare", ranks=1, arguments=more)
    for each in (job, bare):
        each.folder.mkdir()
    fault = {
        "LASTGASP_DIR": str(tmp_path / "ckpts"),
        "LASTGASP_FAULT": "kind=exception,rank=0,step=11,phase=forward",
        "LASTGASP_FAULT_LOG": str(tmp_path / "faults"),
    }
    done = job.run(fault)
    assert done.returncode == 0 and done.left == (), done.output[-4000:]
    assert [fired["rank"] for fired in read_log(tmp_path / "faults")] == [0]
    # A script that calls no init() is trained by msrun's scheduler as well, which lastgasp leaves alone.
    assert [steps for steps in job.steps(0) if steps != list(range(1, 17))] == [list(range(1, 12)), list(range(12, 17))]
    assert bare.run().returncode == 0
    assert {key: set(losses) for key, losses in job.losses().items()} == {
        key: set(losses) for key, losses in bare.losses().items()
    }
