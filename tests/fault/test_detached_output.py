"""`job 2>&1 | tee log` ends when the job does, also where no rank has ever come to the controller that it started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.recovery_backends import TORCH, used
from support.waiting import until

pytestmark = pytest.mark.fault
STARTERS = {
    "embedded": "from lastgasp.gasp.serve import start_detached\nstart_detached()",
    "mindio": (
        "from lastgasp.backends.ascend.mindio.controller import start_controller, tell_used\n"
        "assert tell_used(start_controller('127.0.0.1', 2, False, False))"
    ),
}


def start(name: str) -> None:
    """A rank that dies between starting its controller and joining it; waits for the end of what it writes."""
    command = [sys.executable, "-c", STARTERS[name]]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "")


def gone(pid: int) -> bool:
    """It has ended."""
    return not Path(f"/proc/{pid}").exists()


def test_the_embedded_controller_follows_its_starter() -> None:
    start("embedded")


def test_mindios_controller_has_a_log_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    with used(TORCH, tmp_path, monkeypatch) as trace:
        start("mindio")
        [started] = trace.events("start_controller")
        until(lambda: gone(int(started["pid"])), "the controller leaves by itself")
        assert trace.events("destroy_controller")
        [log] = (tmp_path / "logs").glob("lastgasp-controller-*.log")
    assert "a rank says used: answered 0" in log.read_text()
    assert "no rank is left" in log.read_text()
