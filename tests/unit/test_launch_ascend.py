"""What `lastgasp run` sets on Ascend, instead of the documentation's additions to train_start.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lastgasp.cli import _ascend
from lastgasp.cli._ascend import prepared_here
from lastgasp.errors import ConfigError
from lastgasp.launch.ascend import PREPARED, Machine, Prepared, look, must_start_anew, prepare, render

BOTH = Machine(profiler="/opt/cann/lib64/libmspti.so", taskd="/site/taskd/libtaskd.so")
PRELOAD = {"LD_PRELOAD": "/opt/cann/lib64/libmspti.so:/site/taskd/libtaskd.so"}
POD = {
    "MINDX_TASK_ID": "job-1", "RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "POD_IP": "10.0.0.1",
    "TTP_PORT": "8000", "MASTER_ADDR": "job-master-0",
}  # fmt: skip
MINDSPORE = {
    "MINDX_TASK_ID": "job-1", "MS_ROLE": "MS_WORKER", "MS_NODE_RANK": "1", "MS_WORKER_NUM": "16",
    "MS_LOCAL_WORKER": "8", "MS_SCHED_HOST": "10.0.0.9", "POD_IP": "10.0.0.2", "TTP_PORT": "8001",
    "MS_ENABLE_TFT": "{ARF:1,TTP:1,UCE:1}",
}  # fmt: skip


def settings(prepared: Prepared) -> dict[str, str]:
    """By name; each says why."""
    assert all(setting.why for setting in prepared.settings)
    return {setting.name: setting.value for setting in prepared.settings}


def test_off_ascend_nothing_is_set() -> None:
    found = prepare({"PATH": "/bin"}, Machine())
    assert (found.settings, found.manager, found.taskd_agent) == ((), False, False)


def test_profiling_alone() -> None:
    found = prepare(POD, BOTH)
    assert settings(found) == PRELOAD | {"TASKD_PROCESS_ENABLE": "off", "MASTER_ADDR": "10.0.0.1"}
    assert found.manager
    assert not found.taskd_agent, "nobody restarts single processes: our agent holds for the savers"
    assert found.proxy, "and it is TaskD's agent that starts a pod's proxy otherwise"


@pytest.mark.parametrize(
    ("strategies", "more"),
    [("dump", {}), ("recover", {}), ("retry", {"HCCL_OP_RETRY_ENABLE": "L0:0, L1:1, L2:1"}), ("elastic-training", {})],
)
def test_strategies_of_pytorch(strategies: str, more: dict[str, str]) -> None:
    found = prepare(POD | {"HIGH_AVAILABILITY": strategies}, BOTH)
    expected = PRELOAD | {"TASKD_PROCESS_ENABLE": "on", "MASTER_ADDR": "10.0.0.1", "HCCL_ASYNC_ERROR_HANDLING": "0"}
    assert settings(found) == expected | more
    assert found.manager and found.taskd_agent and not found.proxy


def test_the_other_pods() -> None:
    found = prepare(POD | {"RANK": "1", "HIGH_AVAILABILITY": "dump"}, BOTH)
    assert not found.manager and found.taskd_agent
    assert "MASTER_ADDR" not in settings(found)


def test_strategies_of_mindspore() -> None:
    found = prepare(MINDSPORE, BOTH)
    assert settings(found) == PRELOAD | {
        "TASKD_PROCESS_ENABLE": "on",
        "MS_TFT_IP": "10.0.0.9",
        "MS_TFT_PORT": "8001",
        "MS_ENABLE_THM": "{HCCL_WATCHDOG:0}",
        "HCCL_OP_RETRY_ENABLE": "L0:0, L1:1, L2:1",
    }
    assert not found.taskd_agent, "msrun calls TaskD's agent by itself"
    assert found.taskd_msrun and not found.proxy
    assert not prepare(MINDSPORE | {"MINDX_TASK_ID": ""}, BOTH).taskd_msrun


@pytest.mark.parametrize(
    ("role", "rank", "workers", "first"),
    [
        ("MS_SCHED", "0", "16", True),
        ("MS_WORKER", "0", "16", False),  # there is a scheduler's pod, whose rank is 0 as well
        ("MS_WORKER", "0", "1", True),  # one NPU needs no scheduler
        ("", "0", "16", True),
        ("", "1", "16", False),
    ],
)
def test_one_pod_of_mindspore_has_the_manager(role: str, rank: str, workers: str, first: bool) -> None:
    env = MINDSPORE | {"MS_ROLE": role, "MS_NODE_RANK": rank, "MS_WORKER_NUM": workers}
    assert prepare(env, BOTH).manager is first


def test_rescheduling_of_pods_alone_recovers_no_process() -> None:
    found = prepare(MINDSPORE | {"MS_ENABLE_TFT": "{RSC:1}"}, BOTH)
    assert settings(found) == PRELOAD | {"TASKD_PROCESS_ENABLE": "off"}
    assert found.taskd_msrun and not found.proxy


def test_mindspore_with_profiling_alone_keeps_our_launcher() -> None:
    """Its own would kill the survivors within a second: it hands its workers to TaskD for an item only."""
    found = prepare({name: value for name, value in MINDSPORE.items() if name != "MS_ENABLE_TFT"}, BOTH)
    assert settings(found) == PRELOAD | {"TASKD_PROCESS_ENABLE": "off"}
    assert found.proxy and not found.taskd_msrun


def test_what_the_user_has_set_stays() -> None:
    own = {"TASKD_PROCESS_ENABLE": "off", "HCCL_OP_RETRY_ENABLE": "L0:1", "HCCL_ASYNC_ERROR_HANDLING": "0"}
    found = prepare(POD | own | {"HIGH_AVAILABILITY": "retry", "LD_PRELOAD": "/a/libmspti.so:/b/x.so"}, BOTH)
    assert settings(found) == {
        "LD_PRELOAD": "/site/taskd/libtaskd.so:/a/libmspti.so:/b/x.so",
        "MASTER_ADDR": "10.0.0.1",
    }


def test_a_watchdog_that_would_kill_what_is_to_be_repaired_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"HCCL_ASYNC_ERROR_HANDLING='1'.*dump"):
        prepare(POD | {"HIGH_AVAILABILITY": "dump", "HCCL_ASYNC_ERROR_HANDLING": "1"}, BOTH)
    prepare(POD | {"HCCL_ASYNC_ERROR_HANDLING": "1"}, BOTH)


def test_twice_is_once() -> None:
    env = POD | {"HIGH_AVAILABILITY": "dump,retry"}
    once = prepare(env, BOTH).environment(env)
    assert prepare(once, BOTH).settings == ()
    assert prepare(once, BOTH).environment(once) == once


def test_what_is_missing_is_reported() -> None:
    notes = " ".join(prepare({"MINDX_TASK_ID": "job-1"}, Machine()).notes)
    assert "libmspti.so was not found" in notes and "libtaskd.so was not found" in notes and "POD_IP" in notes


def test_libraries_are_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = tmp_path / "taskd" / "python" / "cython_api" / "libs"
    libraries.mkdir(parents=True)
    (libraries / "libtaskd.so").touch()
    (tmp_path / "taskd" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "cann" / "lib64").mkdir(parents=True)
    (tmp_path / "cann" / "lib64" / "libmspti.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = look({"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann")})
    assert found == Machine(str(tmp_path / "cann/lib64/libmspti.so"), str(libraries / "libtaskd.so"))
    assert look({"LD_LIBRARY_PATH": f":{tmp_path}/cann/lib64"}).profiler == found.profiler

    stat = Path.stat

    def refuse(path: Path, **more: bool) -> os.stat_result:
        if path.name == "libmspti.so":
            raise PermissionError(13, "Permission denied")
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", refuse)
    assert look({"LD_LIBRARY_PATH": "/secret"}).profiler == "", "a folder that this user may not search"


def test_the_plan_can_be_run_by_a_shell() -> None:
    env = POD | {"HIGH_AVAILABILITY": "retry"}
    text = render(prepare(env, BOTH), ["torchrun", "--nproc-per-node", "8", "it's.py"])
    assert "lastgasp manager &" in text and "proxy" not in text
    assert "-m lastgasp.backends.ascend.proxy &" in render(prepare(POD, BOTH), ["torchrun"])
    exports = "\n".join(line for line in text.splitlines() if line.startswith("export"))
    shown = subprocess.run(
        ["sh", "-c", f"{exports}\nenv"], capture_output=True, text=True, timeout=200, check=True, env={}
    )
    assert "HCCL_OP_RETRY_ENABLE=L0:0, L1:1, L2:1" in shown.stdout.splitlines()
    assert text.splitlines()[-1] == "torchrun --nproc-per-node 8 'it'\\''s.py'"


def test_a_launcher_starts_again_once() -> None:
    """TaskD's library reads the environment that the process was started with."""
    code = (
        "import os, sys\n"
        "from lastgasp.launch.ascend import *\n"
        "found = Prepared(settings=(Setting('POD_IP', '10.0.0.1', 'so'),))\n"
        "if must_start_anew(found, os.environ):\n"
        "    os.execve(sys.executable, [sys.executable, '-c', sys.argv[1], sys.argv[1]],\n"
        "              found.environment(os.environ) | {PREPARED: str(os.getpid())})\n"
        "print(b'POD_IP=10.0.0.1' in open('/proc/self/environ', 'rb').read())\n"
    )
    env = {name: value for name, value in os.environ.items() if name != PREPARED}
    command = [sys.executable, "-c", code, code]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=True)
    assert out.stdout == "True\n"
    assert not must_start_anew(Prepared(), {})


def test_a_pod_without_mindclusters_packages_is_told_whose_engine_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGASP_BACKEND", raising=False)
    monkeypatch.setenv("MINDX_TASK_ID", "job")
    (note,) = prepared_here().notes
    assert "lastgasp's own engine leads" in note and "mindio_ttp: not installed" in note
    monkeypatch.setattr(_ascend, "in_taskd_job", lambda choice, environ: True)
    assert prepared_here().notes[-1] == note, "TaskD without MindIO"
    monkeypatch.undo()
    monkeypatch.setenv("MINDX_TASK_ID", "job")
    monkeypatch.setenv("LASTGASP_BACKEND", "embedded")
    assert prepared_here().notes == ()
