"""Scripts edited after MindCluster's guides, off Ascend: registered, marked, switched, killed, started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import taskd_reader
from support.launchers import PATIENCE, environment, finish, incidents, run, running, torchrun, until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT, LOOP = (ROOT / "tests/support" / name for name in ("taskd_script.py", "taskd_loop.py"))


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The drop-in on the job's path alone; a job of TaskD's by its name; all it writes below the test's folder."""
    places = [str(ROOT / "plugins/taskd"), str(ROOT / "plugins/taskd/names")]
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(tmp_path / "runtime"))
    path = os.pathsep.join([*places, environment()["PYTHONPATH"]])
    return {
        "PYTHONPATH": path,
        "MINDX_TASK_ID": "job",
        "TASKD_LOG_PATH": str(tmp_path / "taskd_log"),
        "LASTGASP_SWITCH_FILE": str(tmp_path / "profilingSwitch"),
    }


def ranks(variables: dict[str, str]) -> list[dict[str, Any]]:
    """What `lastgasp ps` lists of the one job; empty while there is none."""
    command = [sys.executable, "-m", "lastgasp", "ps", "--json"]
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE)
    jobs = json.loads(done.stdout)["jobs"]
    return [rank | {"job_state": job["state"]} for job in jobs for rank in job["ranks"]]


def test_a_guides_script_is_registered_marked_switched_and_restarted(tmp_path: Path, variables: dict[str, str]) -> None:
    gate, switch = tmp_path / "gate", tmp_path / "profilingSwitch"
    command = run(SCRIPT, tmp_path / "own.pt", gate, 5)
    with running(tmp_path, command, **variables) as (job,):

        def table(marks: list[str]) -> bool:
            found = ranks(variables)
            return [(one["state"], one["step"], one["marks"]) for one in found] == [("running", 3, marks)] * 2

        usual = ["step", "forward", "dataloader", "save"]
        until(lambda: job.process.poll() is not None or table(usual), "both ranks in the table, behind step 3")
        found = ranks(variables)
        assert {one["job_state"] for one in found} == {"running"}, job.output
        assert all("taskd" in one["versions"] for one in found)
        switch.write_text(json.dumps(dict.fromkeys(("CommunicationOperator", "Step", "SaveCheckpoint"), "off")))
        until(lambda: table(["forward", "dataloader"]), "what the switch file says, on both ranks")
        switch.write_text(json.dumps({"Step": "on"}))
        until(lambda: table(["step", "forward", "dataloader"]), "the steps to be marked again")
        gate.touch()
        assert job.code() == 0, job.output
    assert "a rank has ended; the ranks are only registered" in job.output
    assert job.output.count("begins behind step 5") == 2
    for rank in (0, 1):
        read = taskd_reader.read(tmp_path / f"taskd_log/profiling/job/{rank}")
        assert list(read.steps) == [1, 2, 3, 4, 5, 6, 7, 8] and read.open == {}
        groups = json.loads((tmp_path / f"taskd_log/profiling/job/{rank}/parallel_group.json").read_text())
        assert [group["global_ranks"] for group in groups.values()] == [[0, 1]]
    assert incidents(tmp_path / "taskd_log") == [], "no state of these ranks is known, so there was no recovery"


def test_beside_an_adapter_of_lastgasps_nothing_is_done_twice(tmp_path: Path, variables: dict[str, str]) -> None:
    """The same edits in a script that lastgasp protects: one registration, one range per step, no step lost."""
    fault = variables | {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=5,phase=backward"}
    done = finish(run(LOOP, tmp_path / "ckpts", tmp_path / "final.pt"), tmp_path, **fault)
    assert done.returncode == 0 and (tmp_path / "final.pt").exists(), done.output
    (incident,) = incidents(tmp_path / "ckpts")
    assert (incident.ending, incident.steps_lost) == ("saved", 0) or incident.ending == "in_place", done.output
    assert "TaskD's names add nothing to that" in done.output or "are left out" in done.output
    read = taskd_reader.read(tmp_path / "ckpts/profiling/job/0")
    assert list(read.steps) == list(range(1, 13)), "a step that is marked twice would be there twice"


@pytest.mark.full
@pytest.mark.parametrize("patched", [False, True])
def test_under_plain_torchrun_only_taskds_patch_asks_for_restarts(
    tmp_path: Path, variables: dict[str, str], patched: bool
) -> None:
    command = torchrun(SCRIPT, tmp_path / "own.pt", "-", 5)
    if patched:  # the guides' sed puts the import in front of torch/distributed/run.py
        start = "import taskd.python.adaptor.patch; from torch.distributed.run import main; main()"
        command[1:3] = ["-c", start]
    done = finish(command, tmp_path, **variables)
    assert (done.returncode == 0) is patched, done.output
    assert done.output.count("begins behind step 5") == (2 if patched else 0)
