"""`lastgasp run` in a pod of MindCluster: what it sets, what it starts beside the job, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from lastgasp.testing.jobs import Finished, run_job
from support.ports import free_port

STANDINS = Path(__file__).parent / "ascend_standins"
POD = {
    "MINDX_TASK_ID": "job-1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "POD_IP": "127.0.0.1",
    "TTP_PORT": "8000", "MASTER_ADDR": "job-master-0", "TASKD_PROCESS_INTERVAL": "100",
}  # fmt: skip
SCRIPT = """
import json, os, pathlib, sys, time
names = ("LD_PRELOAD", "TASKD_PROCESS_ENABLE", "HCCL_ASYNC_ERROR_HANDLING")
found = {name: os.environ.get(name) for name in names}
found["exec"] = all(value is None or f"{name}={value}".encode() in open("/proc/self/environ", "rb").read()
                    for name, value in found.items())
found["MASTER"] = [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]]
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))
told = [pathlib.Path(sys.argv[1], name) for name in ("manager", "proxy")]
while not all(one.exists() for one in told):  # the test's time limit ends this
    time.sleep(0.01)
"""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """A machine with TaskD and CANN: packages as stand-ins, libraries that cannot do any harm."""
    site, home = tmp_path / "site", tmp_path / "cann"
    shutil.copytree(STANDINS / "taskd", site / "taskd", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "taskd" / "python" / "cython_api" / "libs").mkdir(exist_ok=True)
    (home / "lib64").mkdir(parents=True)
    (site / "taskd" / "python" / "cython_api" / "libs" / "libtaskd.so").touch()
    (home / "lib64" / "libmspti.so").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    return home


def start(folder: Path, *options: str, **more: str) -> Finished:
    """`lastgasp run` in that pod."""
    paths = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": paths, "ASCEND_TOOLKIT_HOME": str(folder / "cann"), "TASKD_LOG_PATH": str(folder / "logs")}
    own["MASTER_PORT"] = str(free_port())
    told = {f"STANDIN_{name.upper()}_TELLS": str(folder / name) for name in ("manager", "proxy")}
    env = os.environ | POD | own | told | more
    command = [sys.executable, "-m", "lastgasp", "run", *options, "--nproc-per-node", "2"]
    return run_job([*command, str(folder / "script.py"), str(folder)], folder / "log", timeout=250, environ=env)


def test_a_job_gets_what_a_start_script_sets(cann: Path, tmp_path: Path) -> None:
    """Libraries and variables are there when each process begins; manager and proxy run as long as the job."""
    done = start(tmp_path)
    assert done.ok, done.output[-4000:]
    assert done.left == (), "manager and proxy are gone with the job"
    libraries = [cann / "lib64" / "libmspti.so", tmp_path / "site/taskd/python/cython_api/libs/libtaskd.so"]
    for rank in "01":
        found = json.loads((tmp_path / rank).read_text())
        found.pop("MASTER")
        assert found == {
            "LD_PRELOAD": ":".join(map(str, libraries)),
            "TASKD_PROCESS_ENABLE": "off",
            "HCCL_ASYNC_ERROR_HANDLING": None,
            "exec": True,
        }
    assert "lastgasp: TASKD_PROCESS_ENABLE=off (no strategy recovers processes)" in done.output
    assert (tmp_path / "manager").read_text().endswith(" 127.0.0.1")
    assert json.loads((tmp_path / "proxy").read_text())["UpstreamAddr"] == "127.0.0.1"
    assert "before the job did" not in done.output


def test_with_a_strategy_taskds_agent_runs_the_workers(cann: Path, tmp_path: Path) -> None:
    """It takes the static rendezvous alone, keeps a process context per rank, and hands on the launcher's address."""
    done = start(tmp_path, HIGH_AVAILABILITY="dump,recover")
    assert "TaskD's agent runs" in done.output, done.output[-4000:]
    assert done.ok and done.left == (), done.output[-4000:]
    assert sorted(path.name for path in tmp_path.glob("[01]")) == ["0", "1"], "both ranks ran"
    address, port = json.loads((tmp_path / "0").read_text())["MASTER"]
    assert address == POD["POD_IP"] and port.isdigit()
    assert "ListenAddr" not in json.loads((tmp_path / "proxy").read_text()), "TaskD's agent starts its own proxy"
    assert "lastgasp: HCCL_ASYNC_ERROR_HANDLING=0 (the watchdog would end ranks" in done.output


def test_a_dry_run_shows_it_and_starts_nothing(cann: Path, tmp_path: Path) -> None:
    done = start(tmp_path, "--dry-run", HIGH_AVAILABILITY="retry")
    assert done.ok, done.output[-4000:]
    lines = [line for line in done.output.splitlines() if "ld.so" not in line]
    exported = [line.split("=")[0].removeprefix("export ") for line in lines if line.startswith("export ")]
    assert exported == [
        "LD_PRELOAD", "TASKD_PROCESS_ENABLE", "MASTER_ADDR", "HCCL_ASYNC_ERROR_HANDLING", "HCCL_OP_RETRY_ENABLE",
    ]  # fmt: skip
    assert "lastgasp manager &" in done.output
    assert lines[-1].startswith("torchrun --max-restarts 32767") and lines[-1].endswith(f"script.py {tmp_path}")
    assert not (tmp_path / "manager").exists() and not (tmp_path / "0").exists()


def test_embedded_by_choice_sets_nothing(cann: Path, tmp_path: Path) -> None:
    for name in ("manager", "proxy"):
        (tmp_path / name).write_text("nobody")
    done = start(tmp_path, LASTGASP_BACKEND="embedded")
    assert done.ok, done.output[-4000:]
    assert json.loads((tmp_path / "0").read_text())["LD_PRELOAD"] is None
    assert [(tmp_path / name).read_text() for name in ("manager", "proxy")] == ["nobody", "nobody"]


def test_a_contradiction_is_refused(cann: Path, tmp_path: Path) -> None:
    done = start(tmp_path, HIGH_AVAILABILITY="dump", HCCL_ASYNC_ERROR_HANDLING="1")
    assert done.returncode == 2
    assert "HCCL_ASYNC_ERROR_HANDLING='1' is not allowed" in done.output
