"""The fault kit: what LASTGASP_FAULT means, and that each fault fires once, where it should."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lastgasp.errors import ConfigError
from lastgasp.testing import faults
from lastgasp.testing.faults import ALL_RANKS, ANY_STEP, FaultKit, FaultSpec, parse_faults

VICTIM = """
import sys
from lastgasp.testing.faults import FaultKit, parse_faults
FaultKit(parse_faults(f"kind={sys.argv[1]},phase=data")).fire_at("data", 0)
"""


def test_several_faults_are_read_with_their_defaults() -> None:
    specs = parse_faults("kind=sigkill,rank=0,step=12,phase=backward,attempt=1; kind=sleep:2.5,phase=data,rank=all;")
    assert specs == (
        FaultSpec(kind="sigkill", phase="backward", rank=0, step=12, attempt=1),
        FaultSpec(kind="sleep", phase="data", rank=ALL_RANKS, step=ANY_STEP, seconds=2.5),
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("kind=nuke,phase=data", "nuke"),
        ("kind=sleep,phase=data", "sleep:SECONDS"),
        ("kind=sleep:soon,phase=data", "soon"),
        ("kind=sleep:-1,phase=data", "-1"),
        ("kind=sleep:nan,phase=data", "nan"),
        ("kind=sigkill:3,phase=data", "sigkill:3"),
        ("kind=sigkill,phase=lunch", "lunch"),
        ("kind=sigkill", "phase="),
        ("phase=data", "kind="),
        ("kind=sigkill,phase=data,rank=-1", "rank"),
        ("kind=sigkill,phase=data,step=1.5", "step"),
        ("kind=sigkill,phase=data,step=²", "step"),
        ("kind=sigkill,phase=data,attempt=any", "attempt"),
        ("kind=sigkill,phase=data,color=red", "color"),
        ("kind=sigkill,kind=sigkill,phase=data", "at most once"),
        ("sigkill", "sigkill"),
    ],
)
def test_a_malformed_fault_is_refused_with_the_piece_that_is_wrong(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match="LASTGASP_FAULT") as caught:
        parse_faults(text)
    assert names in str(caught.value)


@pytest.mark.parametrize(
    ("phase", "step", "rank", "attempt", "expected"),
    [
        ("backward", 12, 0, 0, True),
        ("backward", 11, 0, 0, False),
        ("backward", 13, 0, 0, False),
        ("forward", 12, 0, 0, False),
        ("backward", 12, 1, 0, False),
        ("backward", 12, 0, 1, False),
    ],
)
def test_a_fault_is_due_only_at_its_own_place(phase: str, step: int, rank: int, attempt: int, expected: bool) -> None:
    assert FaultSpec(kind="sigkill", phase="backward", step=12).due(phase, step, rank, attempt) is expected


@pytest.mark.parametrize("phase", faults.LATER_PHASES)
def test_a_phase_that_not_every_step_has_fires_at_or_after_its_step(phase: str) -> None:
    spec = FaultSpec(kind="sigkill", phase=phase, step=12)
    assert [spec.due(phase, step, 0, 0) for step in (11, 12, 15)] == [False, True, True]


def test_each_fault_fires_once_and_is_on_disk_before_it_happens(tmp_path: Path) -> None:
    log, seen = tmp_path / "fired", list[int]()
    kit = FaultKit(
        parse_faults("kind=sigterm,phase=data,step=3,rank=all"),
        rank=1,
        log=log,
        act=lambda spec: seen.append(len(faults.read_log(log))),
    )
    assert not kit.due("data", 2)
    assert kit.due("data", 3)
    for _ in range(2):
        kit.fire_at("data", 3)
    assert seen == [1]
    (line,) = faults.read_log(log)
    assert (line["kind"], line["at_rank"], line["at_step"]) == ("sigterm", 1, 3)


def test_a_fault_that_raised_does_not_fire_again() -> None:
    kit = FaultKit(parse_faults("kind=exception,phase=update,step=0"))
    with pytest.raises(faults.InjectedFault, match="update"):
        kit.fire_at("update", 0)
    kit.fire_at("update", 0)


def test_no_log_means_nothing_fired(tmp_path: Path) -> None:
    assert faults.read_log(tmp_path / "absent") == []


def test_the_module_fires_only_with_an_installed_kit() -> None:
    faults.fire_at("gasp_save")
    faults.install(FaultKit(parse_faults("kind=exit3,phase=gasp_save")))
    try:
        with pytest.raises(SystemExit, match="3"):
            faults.fire_at("gasp_save")
    finally:
        faults.install(None)


def test_the_environment_gives_rank_attempt_and_log(tmp_path: Path) -> None:
    assert faults.kit_from_env({}) is None
    kit = faults.kit_from_env(
        {
            "LASTGASP_FAULT": "kind=sleep:0,rank=2,step=1,phase=data,attempt=4",
            "LASTGASP_FAULT_LOG": str(tmp_path / "log"),
            "RANK": "2",
            "TORCHELASTIC_RESTART_COUNT": "4",
        }
    )
    assert kit is not None
    kit.fire_at("data", 1)
    assert len(faults.read_log(tmp_path / "log")) == 1


@pytest.mark.parametrize(
    ("kind", "returncode"),
    [
        ("sigkill", -signal.SIGKILL),
        ("sigterm", -signal.SIGTERM),
        ("exit3", 3),
        ("exception", 1),
        ("sleep:0", 0),
    ],
)
def test_each_kind_does_what_it_says_to_a_real_process(kind: str, returncode: int) -> None:
    done = subprocess.run([sys.executable, "-c", VICTIM, kind], capture_output=True, timeout=200, check=False)
    assert done.returncode == returncode


def test_sigstop_stops_the_process_until_it_is_continued() -> None:
    with subprocess.Popen([sys.executable, "-c", VICTIM, "sigstop"]) as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0


def test_a_log_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    """At the fault itself the rank would raise instead of what was asked for."""
    for name in (tmp_path / "nosuch/x", tmp_path):
        with pytest.raises(ConfigError, match=r"LASTGASP_FAULT_LOG=.*Make its directory"):
            faults.kit_from_env({"LASTGASP_FAULT": "kind=sigkill,phase=forward", "LASTGASP_FAULT_LOG": str(name)})
    environ = {"LASTGASP_FAULT": "kind=sigkill,phase=forward", "LASTGASP_FAULT_LOG": str(tmp_path / "x")}
    assert faults.kit_from_env(environ) is not None and not (tmp_path / "x").exists()


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    """It would never happen, and no rank would say so. A job that went on with fewer ranks has had it."""
    environ = {"LASTGASP_FAULT": "kind=sigkill,phase=forward,rank=2", "RANK": "0", "WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match="rank=2 is not allowed: expected a rank of this job, 0 to 1"):
        faults.kit_from_env(environ)
    for more in ({"WORLD_SIZE": "3"}, {"LASTGASP_ATTEMPT": "1"}, {"LASTGASP_INCARNATION": "1"}):
        assert faults.kit_from_env(environ | more) is not None


def test_the_document_names_every_kind_and_phase() -> None:
    page = (Path(__file__).parents[2] / "docs/faults.md").read_text()
    assert {*faults.KINDS, *faults.PHASES} <= set(re.findall(r"`(\w+)(?::SECONDS)?`", page))


def test_a_training_that_is_entered_again_gets_the_faults_of_that_incarnation() -> None:
    seen: list[int] = []
    text = "kind=exception,phase=data;kind=exception,phase=data,incarnation=1"
    kit = FaultKit(parse_faults(text), act=lambda spec: seen.append(spec.incarnation))
    for environ in ({}, {}, {"LASTGASP_INCARNATION": "1"}, {"LASTGASP_INCARNATION": "1"}):
        kit.entered(environ)
        kit.fire_at("data", 0)
    assert seen == [0, 1]
