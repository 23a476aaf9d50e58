"""Launchers on real processes: when they hold, restart and stop, with which exit code, and what they leave."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import SingleFile, candidates, verify
from lastgasp.steps import ringfile
from lastgasp.steps.recover import recover_orphans
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished
from lastgasp.testing.weights import differences
from support import lean
from support.launchers import PATIENCE, SUPPORT, finish, incidents, run, running, torchrun, until
from support.places import without_places
from support.ports import free_port

TINY, WORKER = SUPPORT / "train_tiny.py", SUPPORT / "launch_worker.py"
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def ranks_told(directory: Path, attempt: int, world: int = 2) -> list[dict[str, Any]]:
    """What each rank of an attempt wrote about itself, once all have taken their steps."""
    until(lambda: len(list(directory.glob(f"stepped-*-{attempt}"))) == world, f"attempt {attempt} has stepped")
    return told(directory, attempt)


def told(directory: Path, attempt: int) -> list[dict[str, Any]]:
    """The same, as far as there is any."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob(f"rank-*-{attempt}"))]


# -- when to stop ----------------------------------------------------------------------------------


def test_a_job_that_always_fails_at_the_same_step_is_stopped(tmp_path: Path) -> None:
    done = finish(run(WORKER, tmp_path / "d", "die", 3), tmp_path)
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    assert "lastgasp: stopped: 3 restarts in a row completed no new step" in done.output
    assert "lastgasp incident DIR" in done.output
    assert [len(told(tmp_path / "d", attempt)) for attempt in range(5)] == [2, 2, 2, 2, 0]
    first = incidents(tmp_path / "d")[0]
    assert (first.ending, first.step_saved) == ("saved", 3)
    assert sorted(path.name for path in (tmp_path / "d").glob("step-*")) == ["step-3.toy"]


@pytest.mark.full
def test_an_exception_behind_each_update_does_not_restart_the_job_for_ever(tmp_path: Path) -> None:
    """Each restart completes one step more, so that it is progress by the count of steps."""
    done = finish(run(WORKER, tmp_path / "d", "raise", 0), tmp_path)
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    assert "lastgasp: stopped: one exception has ended the training 5 times in a row" in done.output
    assert "(OSError: the log of step 5 cannot be written)" in done.output
    assert [incident.step_saved for incident in incidents(tmp_path / "d")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("how", "attempts"), [("behind", 1), ("slain", 2), ("late", 1)])
def test_what_fails_behind_the_training_does_not_train_again_for_ever(how: str, attempts: int, tmp_path: Path) -> None:
    """No checkpoint of the last step is there, so that each attempt would train once more, which counts as progress."""
    done = finish(run(WORKER, tmp_path / "d", how, 3), tmp_path)
    assert done.returncode == 1, done.output[-4000:]
    assert [len(told(tmp_path / "d", attempt)) for attempt in range(3)] == [2] * attempts + [0] * (3 - attempts)
    said = "all ranks had completed their training, and what the script does after it failed (exit code "
    if how == "late":
        said = "the script had come to its end on all ranks, and one was killed behind it (exit code "
    assert done.output.count(said) == attempts, done.output[-4000:]
    assert f"lastgasp: stopped: {said}" in done.output
    assert (f"{said}-9); restarting, attempt 2 of " in done.output) == (how == "slain")
    assert incidents(tmp_path / "d") == []


@pytest.mark.full
def test_each_attempt_has_a_store_of_its_own_and_the_same_controller(tmp_path: Path) -> None:
    """(f) torch would read the dead attempt's addresses in a store that was used before."""
    finish(run(WORKER, tmp_path / "d", "die", 1), tmp_path)
    attempts = [told(tmp_path / "d", attempt) for attempt in range(4)]
    ports = [{rank["MASTER_PORT"] for rank in ranks} for ranks in attempts]
    assert all(len(found) == 1 for found in ports), "all ranks of an attempt share a store"
    assert len(set.union(*ports)) == 4
    controllers = {rank["LASTGASP_CONTROLLER"] for ranks in attempts for rank in ranks}
    assert len(controllers) == 1 and None not in controllers
    assert {rank["LASTGASP_JOB"] for ranks in attempts for rank in ranks} != {None}


@pytest.mark.full
def test_an_import_error_is_stopped_too(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_at_all\n")
    done = finish(run(script), tmp_path)
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    assert done.output.count("No module named 'no_such_module_at_all'") >= 2
    assert done.output.count("lastgasp: stopped: 2 starts in a row failed in the same way (exit code 1)") == 1
    assert done.output.count("stopped:") == 1, "the verdict is said once"


def test_a_script_that_launches_by_torchs_api_gets_the_same(tmp_path: Path) -> None:
    """It imports the API before anything else of torch's elastic package: that import itself leads to our hook."""
    script, directory = tmp_path / "launch.py", tmp_path / "ckpts"
    script.write_text(
        "import sys\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch\n"
        "config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=3,\n"
        "                      rdzv_backend='c10d', rdzv_endpoint='127.0.0.1:0', monitor_interval=0.1)\n"
        "elastic_launch(config, sys.executable)('-u', *sys.argv[1:])\n"
    )
    done = finish([sys.executable, str(script), str(WORKER), str(directory), "once", "3"], tmp_path)
    assert done.ok, done.output[-4000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved) == ("saved", 3)


@pytest.mark.cold
@pytest.mark.named
def test_a_job_without_lastgasp_is_plain_torchruns(tmp_path: Path) -> None:
    """Same exit code and attempts, no hold: the survivor gets its SIGTERM as ever; nobody looks at reset.json."""
    reset = tmp_path / "reset.json"
    reset.write_text(json.dumps({"UpdateTime": 4_000_000_000, "GracefulExit": 1}))
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "open(sys.argv[1] + '/start-' + rank, 'a').write('x')\n"
        "if rank == '1':\n"
        "    while not os.path.exists(sys.argv[1] + '/ready'): time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        "def stop(*_):\n"
        "    open(sys.argv[1] + '/sigterm', 'w')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(sys.argv[1] + '/ready', 'w')\n"
        "time.sleep(100)\n"
    )
    ends = []
    for name, variables in (("ours", {}), ("stock", {"LASTGASP_DISABLE": "1"})):
        folder = tmp_path / name
        folder.mkdir()
        done = finish(torchrun(script, folder), folder, LASTGASP_RESET_FILE=str(reset), **variables)
        starts = [(folder / f"start-{rank}").read_text() for rank in (0, 1)]
        ends.append((done.returncode, starts, (folder / "sigterm").exists(), "exitcode  : 7" in done.output))
        assert "lastgasp" not in without_places(done.output, tmp_path)
    assert ends[0] == ends[1] == (1, ["x", "x"], True, True)


def test_what_a_batch_system_sends_to_all_processes_is_for_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (here / ('told-' + os.environ['RANK'])).touch())\n"
        "(here / ('pid-' + os.environ['RANK'] + '.part')).write_text(str(os.getpid()))\n"
        "(here / ('pid-' + os.environ['RANK'] + '.part')).rename(here / ('pid-' + os.environ['RANK']))\n"
        "while not (here / ('told-' + os.environ['RANK'])).exists(): time.sleep(0.01)\n"
    )
    pids = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    with running(tmp_path, run(script, tmp_path)) as [job]:
        until(lambda: all(pid.exists() for pid in pids), "the ranks run")
        for pid in (job.process.pid, *(int(pid.read_text()) for pid in pids)):
            os.kill(pid, signal.SIGUSR1)
        assert job.code() == 0, job.output[-4000:]


def test_max_restarts_0_is_honoured_and_the_exit_code_says_so(tmp_path: Path) -> None:
    done = finish(run("--max-restarts", 0, WORKER, tmp_path / "d", "die", 2), tmp_path)
    assert done.returncode == exitcodes.SAVED, done.output[-4000:]
    assert told(tmp_path / "d", 1) == []
    assert [i.ending for i in incidents(tmp_path / "d")] == ["saved"]


@pytest.mark.full
def test_max_restarts_0_with_a_fault_before_the_first_step(tmp_path: Path) -> None:
    done = finish(run("--max-restarts=0", WORKER, tmp_path / "d", "die", 0), tmp_path)
    assert done.returncode == exitcodes.NOTHING_TO_SAVE, done.output[-4000:]


@pytest.mark.full
def test_a_normal_end_leaves_nothing(tmp_path: Path) -> None:
    for name, command in (("run", run), ("torchrun", torchrun)):
        done = finish(command(WORKER, tmp_path / name, "train", 3), tmp_path)
        assert (done.returncode, done.left) == (0, ()), done.output[-4000:]
        assert not (tmp_path / name / "incidents").exists()
        assert {rank["LASTGASP_LAUNCHER"] for rank in told(tmp_path / name, 0)} == {name}


# -- the launcher itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_launcher_is_told_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "d"
    with running(tmp_path, run(WORKER, directory, "stuck", 4)) as [job]:
        ranks_told(directory, 0)
        job.process.send_signal(number)
        assert job.code() == exitcodes.SAVED, job.output[-4000:]
    assert [path.name for path in directory.glob("step-*")] == ["step-4.toy"]
    assert told(directory, 1) == [], "it restarted what it was asked to stop"
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 4, 0)


STOPPED_INSIDE = """
import os, signal, sys, time, types
from pathlib import Path
from torch.distributed.elastic.metrics import api

def clock():
    now, caller = time.time(), sys._getframe(1).f_locals
    if getattr(caller.get("f"), "__name__", "") == "_monitor_workers" and Path(sys.argv[0]).with_name("now").exists():
        os.kill(os.getpid(), signal.SIGTERM)  # until it is heard
    return now

api.time = types.SimpleNamespace(time=clock)
from lastgasp.cli import main
main(prog_name="lastgasp")
"""


def test_the_launcher_is_told_to_stop_while_torch_reads_the_clock(tmp_path: Path) -> None:
    """Where its handler raises in that moment, torch's timing of a look at the workers ends in an UnboundLocalError."""
    script, directory = tmp_path / "launch.py", tmp_path / "d"
    script.write_text(STOPPED_INSIDE)
    asked = run(WORKER, directory, "stuck", 4)
    with running(tmp_path, [asked[0], str(script), *asked[3:]]) as [job]:
        ranks_told(directory, 0)
        (tmp_path / "now").touch()
        assert job.code() == exitcodes.SAVED, job.output[-4000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 4, 0)


HELD_UP = """
import sys, threading
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing import ProcessContext

def tells(self, timeout=None, *more, join=ProcessContext.join):
    if timeout is None:
        Path(sys.argv[1]).touch()
    return join(self, timeout, *more)

def train():
    threading.Thread(target=threading.Event().wait).start()  # keeps the process

if __name__ == "__main__":
    ProcessContext.join = tells
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, start_method="spawn", monitor_interval=0.1,
                          rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
    elastic_launch(config, train)()
"""


@pytest.mark.full
def test_a_launcher_can_be_stopped_where_torch_waits_for_a_process_that_does_not_end(tmp_path: Path) -> None:
    script, waits = tmp_path / "launch.py", tmp_path / "waits"
    script.write_text(HELD_UP)
    with running(tmp_path, [sys.executable, str(script), str(waits)]) as [job]:
        until(waits.exists, "torch to wait")
        job.process.send_signal(signal.SIGTERM)
        assert job.code() == 1
    assert "SignalException" in job.output


@pytest.mark.full
def test_the_launcher_is_told_to_stop_once_training_is_over(tmp_path: Path) -> None:
    """The ranks save their results: they are let, and the job has succeeded."""
    directory = tmp_path / "d"
    with running(tmp_path, run(WORKER, directory, "export", 4)) as [job]:
        until(lambda: len(list(directory.glob("exports-*"))) == 2, "both ranks have trained")
        job.process.send_signal(signal.SIGTERM)
        until(lambda: "training is over" in job.output, "the launcher waits")
        (directory / "go").touch()
        assert job.code() == 0, job.output[-4000:]
    assert len(list(directory.glob("result-*"))) == 2
    assert incidents(directory) == []


def ask_for_graceful_exit(path: Path) -> None:
    """As MindCluster does, in one piece."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"RankList": [], "UpdateTime": 0, "GracefulExit": 1}))
    part.replace(path)


@pytest.mark.full
def test_reset_json_asks_for_a_graceful_exit(tmp_path: Path) -> None:
    directory, reset = tmp_path / "d", tmp_path / "reset.json"
    with running(tmp_path, run(WORKER, directory, "stuck", 4), LASTGASP_RESET_FILE=str(reset)) as [job]:
        ranks_told(directory, 0)
        ask_for_graceful_exit(reset)
        assert job.code() == exitcodes.SAVED, job.output[-4000:]
    assert "asks for a graceful exit" in job.output
    assert told(directory, 1) == [], "it restarted what it was asked to stop"
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 4, 0)


@pytest.mark.full
def test_reset_json_without_a_launcher(tmp_path: Path) -> None:
    """The detached controller looks at it then."""
    directory, fired, reset = tmp_path / "d", tmp_path / "fired", tmp_path / "reset.json"
    fault = "kind=sleep:60,rank=0,step=5,phase=data"
    variables = {"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(fired), "LASTGASP_RESET_FILE": str(reset)}
    with running(tmp_path, [lean.python(), str(TINY), "--dir", str(directory)], **variables) as [job]:
        until(lambda: bool(read_log(fired)), "rank 0 pauses")
        ask_for_graceful_exit(reset)
        assert job.code() == exitcodes.SAVED, job.output[-4000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 5, 0)
    assert incident.faults[0].kind == "sigterm"


def test_the_launcher_is_killed_and_then_a_rank(tmp_path: Path) -> None:
    """The controller dies with the launcher; the ranks train on, and the survivor saves on its own."""
    directory = tmp_path / "d"
    with running(tmp_path, run(WORKER, directory, "stuck", 4)) as [job]:
        ranks = ranks_told(directory, 0)
        job.process.kill()
        job.code()
        until(lambda: job.output.count("lost the controller") == 2, "both ranks say that the controller is gone")
        assert all(Path(f"/proc/{rank['pid']}").exists() for rank in ranks)
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        os.kill(ranks[0]["pid"], signal.SIGTERM)  # a stuck rank learns of its peer by its collective, or from outside
        until(lambda: not Path(f"/proc/{ranks[0]['pid']}").exists(), "the survivor leaves")
    assert [path.name for path in directory.glob("step-*")] == ["step-4.toy"]
    [incident] = incidents(directory)
    assert (incident.ending, incident.led_by) == ("saved", "rank 0")
    assert "without a controller" in incident.notes[0]


def marks_collected() -> bool:
    """The next launcher on this machine would find no step marks of the dead any more."""
    recover_orphans()
    return not list(ringfile.ring_files())


@pytest.mark.full
def test_a_killed_launcher_of_a_real_job(tmp_path: Path) -> None:
    """With gloo: the survivor's collective raises when its peer dies, and that is enough."""
    directory, fired = tmp_path / "d", tmp_path / "fired"
    fault = "kind=sleep:8,rank=0,step=5,phase=data;kind=sigkill,rank=1,step=6,phase=backward"
    variables = {"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(fired)}
    with running(tmp_path, run(TINY, "--dir", directory), **variables) as [job]:
        until(lambda: bool(read_log(fired)), "rank 0 pauses")
        job.process.kill()
        job.code()
        until(lambda: bool(incidents(directory)), "the survivor has saved")
    until(marks_collected, "both ranks' step marks are on disk")  # the kernel frees the rings after the processes
    assert [spec["kind"] for spec in read_log(fired)] == ["sleep", "sigkill"]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.led_by) == ("saved", 6, "rank 0")
    assert 6 in {candidate.step for candidate in candidates([directory], SingleFile(".ckpt"))}


# -- strangers -------------------------------------------------------------------------------------


def test_idle_connections_of_a_stranger_cost_the_job_nothing(tmp_path: Path) -> None:
    """1024 of them had used up the launcher's descriptors, and the next restart failed; each had its log line."""
    directory, few = tmp_path / "d", 512
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limited = ["/bin/sh", "-c", f'ulimit -S -n {few}; exec "$@"', "sh", *run(WORKER, directory, "stuck", 4)]
    with running(tmp_path, limited) as [job], ExitStack() as stack:
        ranks = ranks_told(directory, 0)
        host, _, port = ranks[0]["LASTGASP_CONTROLLER"].rpartition(":")
        for _ in range(min(2 * few, hard - 200)):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        ranks_told(directory, 1)
        job.process.send_signal(signal.SIGTERM)
        assert job.code() in (exitcodes.SAVED, exitcodes.NOTHING_TO_SAVE), job.output[-4000:]
        assert job.output.count("prove nothing") < 40
    assert incidents(directory)[0].step_saved == 4


# -- several nodes ---------------------------------------------------------------------------------


def node(port: int, *more: object) -> list[str]:
    """One torchrun agent of two, each with one rank."""
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    return [lean.python(), "-m", "lastgasp", "run", *nodes, "--rdzv-endpoint", f"127.0.0.1:{port}", *map(str, more)]


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_two_nodes(tmp_path: Path, victim: int) -> None:
    """A rank of one node is killed; both nodes restart, and the numbers are those of an undisturbed job."""
    reference = finish(run(TINY, "--dir", tmp_path / "ref", "--final", tmp_path / "ref.pt"), tmp_path)
    assert reference.returncode == 0, reference.output[-4000:]
    directory, fired, port = tmp_path / "d", tmp_path / "fired", free_port()
    # Lightning wants to know how many nodes there are; train_tiny's devices are those of all nodes together.
    command = node(port, SUPPORT / "train_tiny_nodes.py", "--dir", directory, "--final", tmp_path / "final.pt")
    variables = {
        "LASTGASP_FAULT": f"kind=sigkill,rank={victim},step=5,phase=backward",
        "LASTGASP_FAULT_LOG": str(fired),
        "LASTGASP_BIND": "127.0.0.1",
        "LASTGASP_TOKEN": uuid.uuid4().hex,
    }
    with running(tmp_path, command, command, **variables) as jobs:
        codes = [job.code() for job in jobs]
        assert codes == [0, 0], "\n".join(job.output[-4000:] for job in jobs)
    assert len(read_log(fired)) == 1
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 5, 0)
    assert {fault.rank for fault in incident.faults} == {victim}
    layout = SingleFile(".ckpt")
    assert all(verify(candidate.path, layout).ok for candidate in candidates([directory], layout))
    assert differences(tmp_path / "ref.pt", tmp_path / "final.pt") == []


@pytest.mark.full
def test_two_nodes_that_share_no_secret_train_on_unprotected_and_say_so_once(tmp_path: Path) -> None:
    """Under plain torchrun; `lastgasp run` refuses before anything starts."""
    directory, port = tmp_path / "d", free_port()
    script = [str(SUPPORT / "train_tiny_nodes.py"), "--dir", str(directory), "--final", str(tmp_path / "final.pt")]
    ours = node(port, *script)
    stock = [lean.python(), "-m", "torch.distributed.run", *ours[ours.index("--nnodes") :]]
    with running(tmp_path, stock, stock) as jobs:
        codes = [job.code() for job in jobs]
        output = "".join(job.output for job in jobs)
        assert codes == [0, 0], output[-8000:]
    assert output.count("each saves on its own") == 1 and "LASTGASP_TOKEN_FILE" in output
    assert (tmp_path / "final.pt").exists()
    refused = finish(ours, tmp_path)
    assert refused.returncode == 2, refused.output
    assert "LASTGASP_TOKEN_FILE=None is not allowed" in refused.output


@pytest.mark.full
def test_a_disk_that_stalls_for_longer_than_any_deadline_does_not_harm_the_job(tmp_path: Path) -> None:
    """The record of a good recovery hangs in the launcher; the job is restarted, ends, and counts as ended well."""
    launcher = [lean.python(), str(SUPPORT / "stalled_launcher.py"), "run", "--nproc-per-node", "2", str(WORKER)]
    done = finish([*launcher, str(tmp_path / "ckpts"), "once", "3"], tmp_path, STALL_S="75")
    assert "stalled" in done.output
    assert done.returncode == 0, done.output[-4000:]
    assert len(told(tmp_path / "ckpts", 1)) == 2


# -- what a person reads ----------------------------------------------------------------------------


LINE = re.compile(r"^(?:\[[^]]*\]:)?\[lastgasp (?P<clock>[0-9:]{8})(?: rank (?P<rank>[0-9]+))?\] (?P<text>.*)$")


def said(done: Finished) -> list[tuple[str, str]]:
    """Lines of lastgasp's in the job's output: who, and what."""
    found = [LINE.match(line) for line in done.output.splitlines()]
    return [(match["rank"] or "launcher", match["text"]) for match in found if match is not None]


def test_a_job_says_what_happens_to_it_and_each_thing_once(tmp_path: Path) -> None:
    """A start line per attempt, one line for the fault with what comes next, one at the end; no rank repeats it."""
    directory = tmp_path / "ckpts"
    done = finish(run(WORKER, directory, "once", 3), tmp_path, LASTGASP_KEEEP="2")
    assert done.ok, done.output[-4000:]
    assert len(said(done)) == 6, said(done)
    first, warned, event, second, warned_again, last = said(done)
    misspelt = ("0", "LASTGASP_KEEEP is set, and nothing reads it. Did you mean LASTGASP_KEEP?")
    assert warned == warned_again == misspelt
    assert first[0] == second[0] == "0"
    start = r"lastgasp \S+: 2 ranks, embedded engine.*; checkpoints in .*/ckpts; starts from scratch; recovery=restart"
    assert re.fullmatch(start, first[1])
    assert second[1].endswith("resumes from step 3; recovery=restart")
    assert event[0] == last[0] == "launcher"
    killed = r"rank 1 was killed \(SIGKILL\) in step 4; step 3 saved by rank 0 in [0-9.]+ m?s"
    assert re.fullmatch(killed + "; restarting, attempt 2 of 32768", event[1])
    assert re.fullmatch(r"done at step 5; 1 fault survived, [0-9.]+ s lost to them", last[1])
    assert "start the job again" not in done.output


@pytest.mark.full
@pytest.mark.parametrize("word", ["quiet", "json"])
def test_how_much_is_said_can_be_chosen(tmp_path: Path, word: str) -> None:
    done = finish(run(WORKER, tmp_path / "ckpts", "once", 3), tmp_path, LASTGASP_LOG=word)
    assert done.ok, done.output[-4000:]
    if word == "quiet":
        assert [who for who, _ in said(done)] == ["launcher"], "the fault alone"
        return
    lines = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    records = [line for line in lines if line.get("logger", "").startswith("lastgasp")]  # torch has JSON of its own
    assert [record["rank"] for record in records] == [0, None, 0, None]
    assert records[1]["level"] == "warning" and records[1]["message"].startswith("rank 1 was killed (SIGKILL)")
