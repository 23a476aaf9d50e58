"""lastgasp-taskd without a job: what its functions answer, where it refuses, and what its ranges write."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp import __version__, backends
from lastgasp.doctor import machine
from lastgasp.gasp import signin
from lastgasp.steps.marks import Marks
from lastgasp.steps.recorder import RecorderOptions, StepRecorder
from support import taskd_reader
from support.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins/taskd"
NAMES = PLUGIN / "names"


@pytest.fixture
def taskd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """`taskd.api`, in this process for this test alone."""
    for place in (PLUGIN, NAMES):
        monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LASTGASP_CONTROLLER", raising=False)
    torch = importlib.import_module("torch")  # before the drop-in, which would otherwise wait for its import
    monkeypatch.setattr(signin, "_last", [])  # a session of another test, which may not have said goodbye
    yield importlib.import_module("taskd.api")
    worker = sys.modules["lastgasp_taskd.worker"]
    if (current := vars(worker)["current"]) is not None:
        current._worker.close()
    vars(torch).pop("npu", None)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("taskd", "lastgasp_taskd")]:
        del sys.modules[name]


def in_a_process(code: str, *first: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it with the drop-in on its path, behind what else is to be found there."""
    path = os.pathsep.join([*map(str, first), str(PLUGIN), str(NAMES)])
    env = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE)


# -- the package ----------------------------------------------------------------------------------


def test_nobody_gets_it_unasked() -> None:
    assert importlib.util.find_spec("taskd") is None, "the environment of the tests has a package taskd"
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not any("taskd" in package for package in wheel["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    own = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert (own["version"], own["dependencies"]) == (__version__, [f"lastgasp=={__version__}"])


def test_it_is_built_on_the_public_seam() -> None:
    """As the import contracts have it for the plugins that are installed."""
    sources = [path.read_text() for path in PLUGIN.rglob("*.py")]
    imported = {name for text in sources for name in re.findall(r"^\s*(?:from|import) (lastgasp[\w.]*)", text, re.M)}
    assert imported, PLUGIN
    assert all(name.startswith(("lastgasp.adapter", "lastgasp_taskd")) for name in imported), imported


def test_it_is_not_taken_for_mindclusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else jobs would register with a TaskD that is not there."""
    place = NAMES / "taskd"
    assert not machine.is_mindcluster(place)
    choice = backends.choose_backend({}, lambda name: place if name == "taskd" else None)
    assert not choice.found("taskd") and "lastgasp-taskd" in choice.describe()


@pytest.mark.parametrize("order", ["before", "behind"])
def test_it_does_not_shadow_the_real_one(tmp_path: Path, order: str) -> None:
    real = tmp_path / "taskd"
    (real / "python/cython_api").mkdir(parents=True)
    (real / "__init__.py").write_text("REAL = True\n")
    if order == "before":
        done = in_a_process("import taskd; print(taskd.REAL)", tmp_path)
        assert done.stdout == "True\n", done.stderr
    else:
        done = in_a_process("import sys; sys.path.append(sys.argv[0] or '.'); import taskd", tmp_path / "none")
        assert done.returncode == 0, done.stderr
        done = in_a_process(f"import sys; sys.path.append({str(tmp_path)!r}); import taskd")
        assert f"does not stand in for MindCluster's own TaskD in {real}" in done.stderr


def test_what_is_not_served_says_why() -> None:
    for name in ("taskd.python.cython_api", "taskd.python.toolkit.recover_module.recover_manager"):
        assert "docs/taskd-drop-in.md" in in_a_process(f"import {name}").stderr


def test_the_patch_lets_torchrun_restart_and_leaves_lastgasps_agent_in_place() -> None:
    code = """
import os
import taskd.python.adaptor.patch
import torch.distributed.run
import torch.distributed.launcher.api as api
from lastgasp.launch.torchrun_hook import swap_agent
swap_agent(api)
print(api.LocalElasticAgent.__name__, os.environ["PET_MAX_RESTARTS"])
"""
    assert in_a_process(code).stdout == "GaspAgent 32767\n"
    assert in_a_process(code, PET_MAX_RESTARTS="3").stdout == "GaspAgent 3\n"


# -- worker ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("0", 5000), "must be whole numbers"),
        ((0, "5000"), "must be whole numbers"),
        ((-1, 5000), "must not be negative"),
        ((0, -1), "must not be negative"),
        ((0, 5000, "tf"), "neither 'pt' nor 'ms'"),
        ((0, 5000, "ms"), "no number in MS_NODE_RANK"),
        ((1, 5000), "no rank 1 in a job of 1"),
    ],
)
def test_a_worker_that_the_real_one_refuses(
    taskd: Any, arguments: tuple[Any, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert taskd.init_taskd_worker(*arguments) is False
    assert why in caplog.text
    assert taskd.start_taskd_worker() is False
    assert taskd.destroy_taskd_worker() is False
    if arguments[2:] != ("ms",):
        mstx = importlib.import_module("torch").npu.mstx
        assert mstx.range_end(mstx.range_start("step 1")) is None, "the script's ranges must do no harm"


def test_a_worker_lives_once_and_marks_without_a_launcher(
    taskd: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    caplog.set_level("INFO", "lastgasp")
    monkeypatch.setenv("MINDX_TASK_ID", "job")
    monkeypatch.setenv("TASKD_PROCESS_INTERVAL", "100")
    assert taskd.init_taskd_worker(0, 5000) and taskd.init_taskd_worker(0, 5000)
    assert taskd.start_taskd_worker()
    mstx = torch.npu.mstx  # type: ignore[attr-defined]
    assert not torch.npu.is_available()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="torch_npu is not installed"):
        torch.npu.synchronize()  # type: ignore[attr-defined]
    mstx.range_end(mstx.range_start("step 1", torch.npu.current_stream()))  # type: ignore[attr-defined]
    assert taskd.destroy_taskd_worker()
    sys.modules["lastgasp_taskd.worker"].current._worker.close()
    assert list(taskd_reader.read(tmp_path / "taskd_log/profiling/job/0").steps) == [1]
    assert "without effect here: TASKD_PROCESS_INTERVAL" in caplog.text
    assert "has its worker already" in caplog.text and "no launcher of lastgasp's" in caplog.text


_SCRIPT = """
import multiprocessing, sys
from taskd.api import init_taskd_worker, start_taskd_worker
print(__name__, init_taskd_worker(0), start_taskd_worker(), flush=True)
import torch

def step(number):
    range_id = torch.npu.mstx.range_start(f"step {number}", torch.npu.current_stream())
    torch.npu.mstx.range_end(range_id)

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=step, args=(7,))
    child.start()
    child.join()
    assert child.exitcode == 0
    step(1)
"""


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_children_of_a_worker_are_none_and_torch_may_come_late(tmp_path: Path, kind: str) -> None:
    """A DataLoader's, whose ranges do nothing."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    env = {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "MINDX_TASK_ID": "job"}
    env |= {"TASKD_LOG_PATH": str(tmp_path / "log"), "PYTHONPATH": os.pathsep.join(map(str, (PLUGIN, NAMES)))}
    command = [sys.executable, str(script), kind]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    again = ["__mp_main__ True True"] * (kind == "spawn")
    assert done.stdout.splitlines() == ["__main__ True True", *again]
    assert done.stderr.count("rank 0 marks its steps") == 1
    assert list(taskd_reader.read(tmp_path / "log/profiling/job/0").steps) == [1]


# -- ranges ---------------------------------------------------------------------------------------


class Recorded:
    """A worker whose marks are on disk once it is closed."""

    def __init__(self, base: Path) -> None:
        self.recorder = StepRecorder.open(RecorderOptions(rank=0, world_size=1, base=base, task="task"))
        self.steps: list[int] = []

    def marks(self) -> Marks:
        """Of the recorder."""
        return self.recorder.marks

    def stepped(self, step: int) -> None:
        """For the test."""
        self.steps.append(step)


@pytest.fixture
def recorded(taskd: Any, tmp_path: Path) -> Iterator[tuple[Recorded, Any]]:
    with_marks = Recorded(tmp_path / "profiling")
    ranges = importlib.import_module("lastgasp_taskd.ranges").Ranges(with_marks, lambda: False)
    yield with_marks, ranges
    with_marks.recorder.close()


def test_ranges_are_written_as_taskd_writes_them(recorded: tuple[Recorded, Any]) -> None:
    worker, mstx = recorded
    step, stream = mstx.range_start("step 7", object()), object()
    inner, other = mstx.range_start("forward", stream), mstx.range_start("train_step 8", stream)
    mstx.range_end(inner)
    mstx.range_end(step)  # in another order than they began
    mstx.range_end(other)
    mstx.range_end(mstx.range_start("dataloader"))
    mstx.range_end(mstx.range_start("layer 007", stream))
    mstx.range_end(0)
    mstx.range_end(12345)
    worker.recorder.close()
    found = taskd_reader.read(worker.recorder.directory)
    assert list(found.steps) == [7, 8] and worker.steps == [7, 8]
    assert len(found.forward) == 1 and len(found.host_only["dataloader"]) == 1
    assert found.names == ["forward", "step 7", "train_step 8", "dataloader", "layer 007"] and found.open == {}


def test_a_line_of_a_range_is_a_line_of_taskds(recorded: tuple[Recorded, Any]) -> None:
    """Byte for byte but for the numbers: tests/golden/taskd-rows.jsonl."""
    worker, mstx = recorded
    mstx.range_end(mstx.range_start("step 1", object()))
    worker.recorder.close()
    (file,) = taskd_reader.files(worker.recorder.directory)
    golden = (ROOT / "tests/golden/taskd-rows.jsonl").read_text().splitlines()
    steps = [line for line in golden if '"Name":"step ' in line]
    shape = re.sub(r"(?<=:)\d+", "N", steps[0].replace(json.loads(steps[0])["Name"], "step 1"))
    assert re.sub(r"(?<=:)\d+", "N", file.read_text().splitlines()[0]) == shape


def test_a_range_that_is_off_is_not_written_and_its_step_counts(recorded: tuple[Recorded, Any]) -> None:
    worker, mstx = recorded
    worker.marks().mask = 0
    mstx.range_end(mstx.range_start("step 3", object()))
    assert mstx.range_start("forward") == 0
    worker.recorder.close()
    assert worker.steps == [3] and taskd_reader.read(worker.recorder.directory).names == []


def test_what_an_adapter_marks_is_left_to_it(recorded: tuple[Recorded, Any]) -> None:
    worker, _ = recorded
    mstx = importlib.import_module("lastgasp_taskd.ranges").Ranges(worker, lambda: True)
    assert mstx.range_start("step 3", object()) == 0
    mstx.range_end(mstx.range_start("tokenize", object()))
    worker.recorder.close()
    assert taskd_reader.read(worker.recorder.directory).names == ["tokenize"] and worker.steps == []


# -- manager, proxy, agent ------------------------------------------------------------------------


MANAGER = """
from taskd.api import init_taskd_manager, start_taskd_manager
import os
job_id=os.getenv("MINDX_TASK_ID")
config = {"job_id":job_id, "node_nums": 1, "proc_per_node": 2}
print(init_taskd_manager(config), config["taskd_enable"], flush=True)
start_taskd_manager()
"""
START = f"""
import subprocess, sys
pipe = subprocess.PIPE
manager = subprocess.Popen([sys.executable, "-c", {MANAGER!r}], stdout=pipe, stderr=pipe, text=True)
print(manager.stdout.readline(), manager.stderr.readline(), manager.pid, sep="")  # what runs the training ends here
"""


def test_a_manager_of_the_guides_ends_with_its_start_script() -> None:
    """manager.py as the guides have it, beside the training that the same script starts."""
    done = in_a_process(START, MINDX_TASK_ID="job")
    first, second, pid = done.stdout.splitlines()
    assert first == "True on" and "waits for the end of the process" in second
    until(lambda: not Path("/proc", pid).exists() or " Z " in Path("/proc", pid, "stat").read_text(), "its end")


EARLY = f"""
import os, subprocess, sys
os.setsid()
wait = "import os, time\\nwhile os.getppid() == int({{}}): time.sleep(0.01)\\n".format(os.getpid())
subprocess.Popen([sys.executable, "-c", wait + {MANAGER!r} + "print('over', flush=True)"])
"""


def test_a_manager_whose_start_script_has_ended_before_it_ends_too() -> None:
    """Nobody is left who could be waited for. The pipe is the manager's, too, so it is over when this returns."""
    assert in_a_process(EARLY, MINDX_TASK_ID="job").stdout == "True on\nover\n"


@pytest.mark.parametrize(
    "config", [None, {}, {"job_id": None, "node_nums": 1, "proc_per_node": 8}, {"job_id": "a", "node_nums": True}]
)
def test_a_manager_that_the_real_one_refuses(taskd: Any, config: Any) -> None:
    assert taskd.init_taskd_manager(config) is False
    assert taskd.start_taskd_manager() is False


def test_a_proxy_takes_addresses_and_no_names(taskd: Any) -> None:
    assert taskd.init_taskd_proxy({"UpstreamAddr": "10.0.0.1", "UpstreamPort": "9601"})
    assert not taskd.init_taskd_proxy({"UpstreamAddr": "node-0"})
    assert not taskd.init_taskd_proxy({"UpstreamPort": 9601})
    assert not taskd.init_taskd_proxy({"ServerRank": "first"})
    assert taskd.destroy_taskd_proxy()


def test_agents(taskd: Any) -> None:
    assert taskd.start_taskd_agent() is None and not taskd.register_func("MONITOR", print)
    assert not taskd.init_taskd_agent({"Framework": "pytorch"}, object())
    assert not taskd.init_taskd_agent({"Framework": "PyTorch"})
    assert taskd.init_taskd_agent({"Framework": "PyTorch"}, object())
    assert taskd.register_func("MONITOR", print) and not taskd.register_func("STOP", print)
    assert not taskd.init_taskd_agent({"Framework": "MindSpore"}), "msrun then runs its workers by itself"
    with pytest.raises(RuntimeError, match="lastgasp run --framework"):
        importlib.import_module("taskd.python.framework.agent.ms_mgr.msrun_plugin").MSRunPlugin()
