"""A script that trains twice under MindIO, whose processor lives once: the embedded engine leads the second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.events import Incident
from lastgasp.gasp.observer import PATIENCE
from lastgasp.testing.weights import differences
from support.launchers import SUPPORT, finish, incidents, torchrun
from support.recovery_backends import TORCH, used

LIGHTNING = SUPPORT / "train_again_lightning.py"
KILLED = "kind=sigkill,rank=1,step=8,phase=backward"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def check_saved(incident: Incident) -> None:
    """At once, and not when MindIO has had its time."""
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), incident
    assert incident.led_by == "controller", incident
    assert incident.phases.detected and incident.phases.agreed
    assert incident.phases.agreed - incident.phases.detected < PATIENCE / 2 * 1e9


def test_no_step_of_a_second_fit_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is over before step 8."""
    folders = {name: tmp_path / name for name in ("undisturbed", "d")}
    for name, directory in folders.items():
        directory.mkdir()
        (directory / "go").touch()
        command = torchrun(LIGHTNING, "--dir", directory, "--twice", ranks=2)
        fault = {"LASTGASP_FAULT": KILLED} if name == "d" else {}
        with used(TORCH, directory, monkeypatch) as trace:
            done = finish(command, directory, LASTGASP_WARM="off", **fault)
            assert done.ok, done.output[-8000:]
            started = [event["pid"] for event in trace.events("init_processor")]
            assert len(started) == len(set(started)) == (4 if fault else 2)
            said = "embedded engine (mindio_ttp: it leads one training of a process, and has led it)"
            assert done.output.count(said) == len(started) / 2
    [incident] = incidents(folders["d"])
    check_saved(incident)
    assert differences(folders["undisturbed"] / "final.pt", folders["d"] / "final.pt") == []
