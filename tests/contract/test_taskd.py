"""TaskD's worker, manager and agent: nothing that the real package refuses in silence gets to it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.backends.ascend import goenv, taskd
from lastgasp.backends.ascend.evidence import Evidence, evidence
from lastgasp.backends.ascend.logdir import prepare_log_directory
from lastgasp.backends.ascend.manager import ManagerConfig, manager_config, run_manager
from lastgasp.backends.ascend.proxy import proxy_config, run_proxy
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError, ControlError
from lastgasp.jobs.registry import card_of_this_process
from lastgasp.session import Session
from lastgasp.steps.attach import Marking
from lastgasp.topology import Place, data_parallel
from support.engine_worker import ToySource
from support.waiting import PATIENCE, until

STANDINS = Path(__file__).parent / "ascend_standins"
POD = {
    "MINDX_TASK_ID": "job-1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "0", "POD_IP": "10.0.0.1",
    "TTP_PORT": "8000",
}  # fmt: skip
"""What the operator and the YAML set in a pod."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restored_environ: None) -> Iterator[Any]:
    """`taskd.api`, imported as a rank would, with a proxy that listens."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(STANDINS)
        for name, value in {**POD, "STANDIN_PROXY_PORT": str(proxy.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        _forget()
        prepare_log_directory(os.environ)
        found = taskd.import_taskd()
        monkeypatch.setattr(taskd, "_STARTED", [])
        yield found
        found._close()
        assert sys.modules["taskd"].violations == []
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name == "taskd" or name.startswith("taskd.")]:
        del sys.modules[name]


def registry(api: Any, **more: Any) -> taskd.TaskdRegistry:
    """One for rank 3 that looks at this very process, but for the profiler's library."""

    def look() -> Evidence:
        found = evidence(port=api.PROXY_PORT)
        return Evidence(profiler=api.PROFILER, proxy=found.proxy, manager=True, connected=found.connected)

    return taskd.TaskdRegistry(api, "pt", look=look, **more)


# -- the worker -----------------------------------------------------------------------------------


def registered(caplog: pytest.LogCaptureFixture) -> None:
    """Wait for the worker's report; on a failure the assertion shows what it reported instead."""
    deadline = time.monotonic() + PATIENCE
    while "is registered with TaskD" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_worker_is_registered_once_and_its_connection_is_seen(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lastgasp")
    one = registry(api)
    one.register(card_of_this_process(3))
    one.register(card_of_this_process(3))
    registered(caplog)
    one.deregister()
    assert "rank 3 is registered with TaskD" in caplog.text
    assert api.calls == [("init_taskd_worker", 3, 5000, "pt"), ("start_taskd_worker",)]


def test_a_second_training_in_the_process_has_the_same_worker(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Another init would run a second set of goroutines."""
    caplog.set_level("INFO", "lastgasp")
    for _ in range(2):
        caplog.clear()
        one = registry(api)
        one.register(card_of_this_process(3))
        registered(caplog)
        one.deregister()
        assert "rank 3 is registered with TaskD" in caplog.text
    assert api.calls == [("init_taskd_worker", 3, 5000, "pt"), ("start_taskd_worker",)]


WORKER = """
import time
import taskd.api
from lastgasp.backends.ascend.evidence import Evidence, evidence
from lastgasp.backends.ascend.taskd import TaskdRegistry
from lastgasp.jobs.registry import card_of_this_process

def look():
    return Evidence(profiler=True, proxy=True, manager=True, connected=evidence(port=taskd.api.PROXY_PORT).connected)

one = TaskdRegistry(taskd.api, "pt", look=look)
one.register(card_of_this_process(0))
while not look().connected:  # the test's time limit ends this
    time.sleep(0.01)
one.deregister()
print("trained to the end")
"""


def test_a_finished_job_ends_well(api: Any, tmp_path: Path) -> None:
    """TaskD's library panics where anybody but its own exit hook closes its network."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", WORKER], env=env, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "trained to the end\n"), done.stderr


def test_what_is_missing_is_reported(
    api: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "PROFILER", False)
    monkeypatch.setattr(taskd, "REGISTERED_WITHIN", 0.0)
    one = registry(api)
    one.register(card_of_this_process(3))
    until(lambda: "is not registered with TaskD: libmspti.so is not loaded" in caplog.text, "it is reported")
    one.deregister()


def test_a_refusal_is_reported(api: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    registry(api).register(card_of_this_process(3))
    assert "TaskD does not know rank 3: it refused the worker" in caplog.text


def test_the_inner_registry_is_notified_as_well(api: Any) -> None:
    told: list[object] = []

    class Inner:
        def register(self, card: object) -> None:
            told.append(card)

        def deregister(self) -> None:
            told.append("gone")

    one, card = registry(api, inner=Inner()), card_of_this_process(3)
    one.register(card)
    one.deregister()
    assert told == [card, "gone"]


@pytest.mark.parametrize(
    ("framework", "limit", "drop", "field"),
    [
        ("jax", 5000, "", "framework"),
        ("pt", 9, "", "profiling_limit_mb"),
        ("pt", True, "", "profiling_limit_mb"),
        ("pt", 5000.0, "", "profiling_limit_mb"),
        ("pt", 5000, "RANK", "RANK"),
        ("pt", 5000, "RANK=\N{SUPERSCRIPT TWO}", "RANK"),
        ("pt", 5000, "LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        ("ms", 5000, "", "MS_NODE_RANK"),
    ],
)
def test_what_taskd_answers_with_a_bare_false_is_refused(framework: str, limit: Any, drop: str, field: str) -> None:
    name, _, value = drop.partition("=")
    env = POD | {name: value}
    with pytest.raises(ConfigError) as refused:
        taskd.check_worker(framework, limit, env)
    assert refused.value.field == field


def test_open_prepares_what_the_import_needs(api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the umask of many start scripts, and a directory that somebody has made with mode 0755."""
    _forget()
    (tmp_path / "logs").mkdir(mode=0o755)
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "logs"))
    before = os.umask(0o077)
    try:
        taskd.TaskdRegistry.open("pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o750


def test_another_package_of_that_name_is_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taskd").mkdir()
    (tmp_path / "taskd" / "__init__.py").touch()
    (tmp_path / "taskd" / "api.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    _forget()
    with pytest.raises(ControlError, match="not MindCluster's TaskD"):
        taskd.import_taskd()
    _forget()


# -- the log directory ----------------------------------------------------------------------------


def test_a_log_directory_is_made_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = prepare_log_directory({"TASKD_LOG_PATH": str(tmp_path / "new" / "logs")})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_a_log_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link", "file/below"):
        with pytest.raises(ConfigError, match="TASKD_LOG_PATH"):
            prepare_log_directory({"TASKD_LOG_PATH": str(tmp_path / name)})


def test_all_ranks_of_a_node_may_make_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def slow(path: Path, *args: Any, **more: Any) -> None:
        if path.name == "logs" and not path.exists():
            os.mkdir(path)  # another rank was faster
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", slow)
    path = prepare_log_directory({"TASKD_LOG_PATH": str(tmp_path / "logs")})
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


# -- the environment of exec time -----------------------------------------------------------------


def test_a_variable_that_was_set_too_late_is_seen() -> None:
    code = (
        "import os; from lastgasp.backends.ascend.goenv import *\n"
        "os.environ['POD_IP'] = '10.0.0.2'; os.environ['OTHER'] = 'x'\n"
        "print(sorted(set_too_late(environment_at_exec(), os.environ).items()))"
    )
    env = os.environ | {"POD_IP": "10.0.0.1", "MINDX_TASK_ID": "job-1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=250, check=True)
    assert out.stdout.strip() == "[('POD_IP', ('10.0.0.1', '10.0.0.2'))]"
    assert "MINDX_TASK_ID" in goenv.GO_VARIABLES


# -- in a Session ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("variables", "registers"), [({}, True), ({"LASTGASP_BACKEND": "embedded"}, False)])
def test_a_session_registers_its_worker(
    api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], registers: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    session = Session(GaspConfig.resolve(tmp_path), place, ToySource(0, tmp_path, {}), None, Marking())
    session.training_started(0, 0)
    session.close()
    expected = [("init_taskd_worker", 0, 5000, "pt"), ("start_taskd_worker",)]
    assert api.calls == (expected if registers else [])


# -- what a process shows ---------------------------------------------------------------------------


def test_evidence_of_a_connection_of_this_process_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        assert evidence(port=port, upstream=1) == Evidence(profiler=False, proxy=True, manager=False, connected=False)
        with socket.create_connection(("127.0.0.1", port)):
            assert evidence(port=port).connected
            code = f"from lastgasp.backends.ascend.evidence import *; print(evidence(port={port}))"
            other = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True
            )
            assert "connected=False" in other.stdout
    assert "no TaskD proxy listens" in Evidence(profiler=True, proxy=False, manager=False, connected=False).missing
    assert not Evidence(profiler=True, proxy=True, manager=True, connected=True).missing


def test_a_proxy_whose_manager_is_dead_registers_nobody() -> None:
    """A worker's connection to the proxy exists all the same; that of the proxy to the manager is missing."""
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as manager:
        port, upstream = proxy.getsockname()[1], manager.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            found = evidence(port=port, upstream=upstream)
            assert found.connected and not found.manager
            dead = Evidence(profiler=True, proxy=True, manager=False, connected=True)
            assert not dead.registered and "manager" in dead.missing
            with socket.create_connection(("127.0.0.1", upstream)):
                assert evidence(port=port, upstream=upstream).manager


# -- the manager ----------------------------------------------------------------------------------


def test_the_manager_learns_its_sizes_from_the_operator() -> None:
    assert manager_config(POD) == ManagerConfig("job-1", 2, 8, True)
    mindspore = {name: POD[name] for name in ("MINDX_TASK_ID", "POD_IP", "TTP_PORT")}
    mindspore |= {"MS_WORKER_NUM": "32", "MS_LOCAL_WORKER": "8", "TASKD_PROCESS_ENABLE": "off"}
    assert manager_config(mindspore) == ManagerConfig("job-1", 4, 8, False)
    assert manager_config(POD, nodes=3, per_node=4) == ManagerConfig("job-1", 3, 4, True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"MINDX_TASK_ID": ""}, "MINDX_TASK_ID"),
        ({"WORLD_SIZE": "15"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "\N{SUPERSCRIPT TWO}"}, "WORLD_SIZE"),
        ({"TTP_PORT": "\N{SUPERSCRIPT TWO}"}, "TTP_PORT"),
        ({"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"POD_IP": ""}, "POD_IP"),
        ({"TTP_PORT": ""}, "TTP_PORT"),
        ({"TTP_PORT": "80"}, "TTP_PORT"),
    ],
)
def test_what_the_manager_would_only_log_is_refused(change: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        manager_config(POD | change)
    assert refused.value.field == field


def test_profiling_alone_needs_no_controller() -> None:
    env = {name: value for name, value in POD.items() if name != "TTP_PORT"} | {"TASKD_PROCESS_ENABLE": "off"}
    assert not manager_config(env).controls


def test_the_manager_serves_until_it_ends(api: Any) -> None:
    """The real one blocks for ever; when it returns, something is wrong."""
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            run_manager(manager_config(POD))
        except ControlError as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    until(lambda: ("start_taskd_manager",) in api.calls, "the manager has begun")
    assert failed == [], "it is serving"
    api.manager_ended.set()
    thread.join(PATIENCE)
    assert api.calls[0] == ("init_taskd_manager", {"job_id": "job-1", "node_nums": 2, "proc_per_node": 8})
    assert "ended" in str(failed[0])


# -- the proxy ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "upstream"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "3"}, "10.0.0.1"),
        ({"MASTER_ADDR": "localhost", "RANK": "3"}, "127.0.0.1"),  # TaskD takes addresses only
        ({"MS_SCHED_HOST": "10.0.0.9", "MASTER_ADDR": "10.0.0.1", "MS_NODE_RANK": "3"}, "10.0.0.9"),
    ],
)
def test_a_proxy_reaches_the_managers_pod(env: dict[str, str], upstream: str) -> None:
    config = proxy_config(env)
    assert config == {"UpstreamAddr": upstream, "UpstreamPort": "9601", "ListenAddr": "127.0.0.1", "ListenPort": "9602",
                      "ServerRank": "3"}  # fmt: skip
    assert proxy_config({})["UpstreamAddr"] == "127.0.0.1" and proxy_config({})["ServerRank"] == "0"


def test_a_name_that_nobody_knows_is_reported_in_time() -> None:
    with pytest.raises(ControlError, match=r"MASTER_ADDR=nowhere\.invalid"):
        proxy_config({"MASTER_ADDR": "nowhere.invalid"}, limit=0.0)


def test_the_proxy_serves_as_long_as_its_launcher(api: Any) -> None:
    alive = threading.Event()
    alive.set()
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            run_proxy(proxy_config({"MASTER_ADDR": "10.0.0.1"}), alive.is_set, period=0.01)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    until(lambda: bool(api.calls), "the proxy has begun")
    assert api.calls[0][0] == "init_taskd_proxy" and thread.is_alive(), "the manager has not answered yet"
    (begun,) = [t for t in threading.enumerate() if t.name == "lastgasp-taskd-proxy"]
    api.manager_answers.set()
    begun.join(PATIENCE)  # a launcher that ends before TaskD has answered has no proxy to end
    alive.clear()
    thread.join(PATIENCE)
    assert not thread.is_alive() and failed == []
    assert api.calls[-1] == ("destroy_taskd_proxy",)


def test_a_proxy_that_is_refused_is_reported(api: Any) -> None:
    with pytest.raises(ControlError, match="refused"):
        run_proxy(proxy_config({}) | {"UpstreamAddr": "job-master-0"}, lambda: True)


# -- the agent ------------------------------------------------------------------------------------

AGENT = """
import torch.distributed.launcher.api as api
from lastgasp.backends.ascend.agent import is_patched, use_taskd_agent
from lastgasp.launch.torchrun_hook import swap_agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent as stock
use_taskd_agent(); use_taskd_agent()
assert is_patched()
api.launch_agent("config", "script", ["a"], None)
api.launch_agent("config", "script", ["a"], health_check_server=None)
swap_agent(api)
assert api.LocalElasticAgent is stock, "TaskD's agent must stay"
from taskd.python.adaptor.patch import launched
assert launched == [("config", "script", ["a"])] * 2, launched
print("well")
"""


def test_torch_calls_taskds_agent_with_an_argument_more(api: Any, tmp_path: Path) -> None:
    """In a launcher with the umask of many start scripts, with which importing TaskD raises unless that is seen to."""
    paths = os.pathsep.join([str(STANDINS), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = subprocess.run(
        [sys.executable, "-c", AGENT],
        env=os.environ
        | {"PYTHONPATH": paths, "TASKD_LOG_PATH": str(tmp_path / "made" / "by" / "us"), "STANDIN_AGENT": "only told"},
        umask=0o077,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1] == "well", done.stderr
