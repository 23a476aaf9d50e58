"""examples/mindformers_llama as its README says: real text, killed, resumed, the losses of a run that was not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished, run_job
from support.mindspore import place
from support.mindspore.job import EXAMPLE, REPOSITORY
from support.ports import free_port

LAST, FAULT = 60, 33
LOSS = re.compile(r"step:\[ *(\d+)/ *60\], loss:\[([^/]+)/")

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def run(out: Path, **environ: str) -> Finished:
    """run.sh, in an environment with lastgasp and MindFormers."""
    out.mkdir()
    paths = (REPOSITORY / "core", REPOSITORY / "plugins/mindformers")
    own = {
        "PATH": f"{place.python().parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OUT": str(out),
    }
    command = [str(EXAMPLE / "run.sh"), f"--master_port={free_port()}"]
    return run_job(command, out / "log", timeout=400.0, environ=os.environ | own | environ)


def losses(out: Path) -> dict[int, set[str]]:
    """Step -> what rank 0 logged for it in all of its processes."""
    found: dict[int, set[str]] = {}
    for log in sorted((out / "msrun").glob("worker_0*.log")):
        for step, loss in LOSS.findall(log.read_text(errors="replace")):
            found.setdefault(int(step), set()).add(loss)
    return found


def killed(out: Path) -> dict[int, set[str]]:
    """Run it with a rank killed in step `FAULT`; the losses of the whole training."""
    fired = out.parent / "fired"
    kill = {"LASTGASP_FAULT": f"kind=sigkill,rank=1,step={FAULT},phase=forward", "LASTGASP_FAULT_LOG": str(fired)}
    done = run(out, **kill)
    assert len(read_log(fired)) == 1, done.output[-4000:]
    assert done.ok, done.output[-4000:]
    (record,) = (out / "output/incidents").glob("*.json")
    incident = decode_incident(record.read_bytes())
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", FAULT, 0)
    found = losses(out)
    assert sorted(found) == list(range(1, LAST + 1))
    assert float(min(found[LAST])) < float(min(found[1])) - 1, "it learns"
    return found


@pytest.mark.full
def test_killed_it_continues_and_learns(tmp_path: Path) -> None:
    assert {len(values) for values in killed(tmp_path / "broken").values()} == {1}, "no step was trained differently"


@pytest.mark.full
def test_killed_and_resumed_the_losses_are_equal(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    assert whole.ok, whole.output[-4000:]
    assert killed(tmp_path / "broken") == losses(tmp_path / "whole")
