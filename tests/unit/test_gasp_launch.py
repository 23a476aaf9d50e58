"""The launcher's decisions without a launcher: where the controller listens, defaults, progress, help."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed.run import get_args_parser

from lastgasp.cli.run import with_defaults
from lastgasp.connect import place_in_job
from lastgasp.errors import ConfigError, DeadlineExceeded
from lastgasp.gasp import messages as m
from lastgasp.gasp import signin
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.link import Link
from lastgasp.gasp.observer import Observer
from lastgasp.gasp.operator import OperatorLink
from lastgasp.launch import attempts as attempts_module
from lastgasp.launch import finishing
from lastgasp.launch.agent import GaspAgent
from lastgasp.launch.attempts import LaunchAttempt, LaunchAttempts
from lastgasp.launch.finishing import FINISH
from lastgasp.launch.stop_signals import StopSignals
from lastgasp.session import Contact
from lastgasp.steps.attach import Marking, open_recorder
from lastgasp.topology import data_parallel
from support.fake_controller import HELLO
from support.waiting import until
from support.worker_group import Group, Store, begun

OURS = ["--max-restarts", "32767", "--monitor-interval", "0.01"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell of the tests has set."""
    for name in [name for name in os.environ if name.startswith(("PET_", "LASTGASP_BIND", "LASTGASP_LAUNCHER"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LASTGASP_TOKEN", "0123456789abcdef")


# -- defaults of `lastgasp run` --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train.py"], [*OURS, "--standalone"]),
        (["--nproc-per-node", "2", "train.py", "--max-restarts", "0"], [*OURS, "--standalone"]),
        (["--max-restarts", "0", "train.py"], [*OURS[2:], "--standalone"]),
        (["--max_restarts=1", "train.py"], [*OURS[2:], "--standalone"]),
        (["--monitor-interval", "1", "train.py"], [*OURS[:2], "--standalone"]),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "train.py"], OURS),
        (["--master_port=1", "train.py"], OURS),
        (["--standalone", "train.py"], OURS),
        (["-m", "--nnodes=2", "pkg.train", "--x"], OURS),
        (["-m", "pkg.train", "--nnodes", "2"], [*OURS, "--standalone"]),
        (["--no-python", "./train", "--rdzv-id", "3"], [*OURS, "--standalone"]),
        (["train_without_suffix", "--master-addr", "foo"], [*OURS, "--standalone"]),
    ],
)
def test_defaults_are_put_in_front_of_what_was_not_given(arguments: list[str], extra: list[str]) -> None:
    assert with_defaults(arguments, get_args_parser()) == extra + arguments


@pytest.mark.parametrize(
    ("variable", "extra"),
    [
        ("PET_NNODES", OURS),
        ("PET_RDZV_ENDPOINT", OURS),
        ("PET_MASTER_ADDR", OURS),
        ("PET_MAX_RESTARTS", [*OURS[2:], "--standalone"]),
        ("PET_NPROC_PER_NODE", [*OURS, "--standalone"]),
    ],
)
def test_torchruns_own_variables_beat_our_defaults(
    monkeypatch: pytest.MonkeyPatch, variable: str, extra: list[str]
) -> None:
    """Kubernetes operators start jobs with them."""
    monkeypatch.setenv(variable, "2")
    assert with_defaults(["train.py"], get_args_parser()) == [*extra, "train.py"]


def test_help_lists_the_exit_codes_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from lastgasp.cli import main\n"
        "sys.argv = ['lastgasp', 'run', '--help']\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("83", "84", "85", "86", "--max-restarts", "Examples:", "--framework megatron"):
        assert word in done.stdout


# -- where the controller listens ------------------------------------------------------------------


def begin(attempts: LaunchAttempts, group: Group, others: Sequence[LaunchAttempts] = ()) -> dict[str, str]:
    """The workers' environment of the next round, of this agent or, where there are others, of all of them."""
    return begun(group, attempts, *others)[0].environment


def test_rounds_keep_their_controller_and_count() -> None:
    attempts = LaunchAttempts()
    try:
        first, second = begin(attempts, Group()), begin(attempts, Group())
    finally:
        assert attempts.close() == ""
        assert attempts.close() == ""
    assert first["LASTGASP_CONTROLLER"] == second["LASTGASP_CONTROLLER"]
    assert (first["LASTGASP_ATTEMPT"], second["LASTGASP_ATTEMPT"]) == ("0", "1")
    assert first["LASTGASP_LAUNCHER"] == "torchrun"
    assert first["LASTGASP_JOB"] == "job"


def test_a_process_that_goes_on_after_its_job_has_its_own_variables_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook, or a driver, that calls `elastic_launch`, and trains itself later."""
    monkeypatch.delenv("LASTGASP_CONTROLLER", raising=False)
    monkeypatch.setenv("LASTGASP_JOB", "the user's")
    before = dict(os.environ)
    attempts = LaunchAttempts()
    try:
        for _ in range(2):
            attempts.export(begin(attempts, Group()) | {"LASTGASP_CODE": "/proc/1/fd/3"})
        assert os.environ["LASTGASP_CONTROLLER"]
        assert os.environ["LASTGASP_JOB"] == "job"
        os.environ["LASTGASP_CODE"] = "changed by another"
    finally:
        attempts.close()
    assert dict(os.environ) == before | {"LASTGASP_CODE": "changed by another"}
    del os.environ["LASTGASP_CODE"]


@pytest.mark.parametrize("joined", [False, True])
def test_a_restart_that_nobody_has_joined_does_not_forget_what_is_saved(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to the launcher while the ranks of a restart still import: the step of the attempt before is saved."""
    attempts, found = LaunchAttempts(), list[dict[int, signin.Entry]]()
    saved = signin.Entry(rank=0, pid=7, hold=1.0, directory="", ending="saved", step=3)
    monkeypatch.setattr(signin.Desk, "entries", property(lambda self: found[-1]))
    try:
        begin(attempts, Group())
        found.append({0: saved})
        attempts.end_attempt()
        found.append({0: msgspec.structs.replace(saved, ending="", step=-1)} if joined else {})
        begin(attempts, Group())
    finally:
        assert attempts.close() == ("" if joined else "saved")
    assert attempts.last_word.safe == ("" if joined else "step 3 is safe in ")


@pytest.fixture
def own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's connections are of this machine alone."""
    monkeypatch.setattr(attempts_module, "own_address", lambda port: "127.0.0.1")
    monkeypatch.setattr(Store, "port", 1, raising=False)


@pytest.mark.usefixtures("own_network")
def test_other_nodes_learn_of_it_through_the_store() -> None:
    first, second = LaunchAttempts(), LaunchAttempts()
    try:
        ours, theirs = begun(Group(group_world_size=2), first, second)
    finally:
        first.close()
        second.close()
    for name in ("LASTGASP_CONTROLLER", "LASTGASP_TOKEN", "LASTGASP_JOB", "LASTGASP_ATTEMPT"):
        assert ours.environment[name] == theirs.environment[name]
    assert ours.environment[signin.VARIABLE] != theirs.environment[signin.VARIABLE], "each has its own ranks sign in"
    assert ours.environment["LASTGASP_TOKEN"] == "0123456789abcdef"


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("late", [0, 1])
def test_an_agent_that_replaces_another_takes_the_others_count(late: int) -> None:
    """Also where it becomes the first: an attempt that had a number before would be refused, or read old addresses."""
    agents, group = [LaunchAttempts(), LaunchAttempts()], Group(group_world_size=2)
    replaced = agents[late]
    try:
        for _ in range(3):
            begun(replace(group, store=Store()), *agents)
        agents[late] = LaunchAttempts()
        numbers = [current.number for current in begun(replace(group, store=Store()), *agents)]
    finally:
        for agent in (*agents, replaced):
            agent.close()
    assert numbers == [3, 3]


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("late", [0, 1])
def test_a_host_that_comes_later_reaches_the_controller(late: int) -> None:
    """`--nnodes 1:2`: while the job has one host, nobody else reaches its controller, or knows its token."""
    alone, newcomer = LaunchAttempts(), LaunchAttempts()
    agents = (alone, newcomer) if late else (newcomer, alone)
    try:
        before = begin(alone, Group())
        trained(before, step=5)
        until(lambda: alone.summary("done").startswith("done at step 5"), "the controller has heard of the step")
        told = [current.environment for current in begun(Group(group_world_size=2), *agents)]
        assert len({(one["LASTGASP_CONTROLLER"], one["LASTGASP_TOKEN"], one["LASTGASP_ATTEMPT"]) for one in told}) == 1
        with pytest.raises(DeadlineExceeded):
            OperatorLink(before["LASTGASP_CONTROLLER"], before["LASTGASP_TOKEN"], seconds=0.1)
        trained(told[1], step=3)
        step = 5 if late else 3  # of which the launcher has heard that says how the job has ended
        until(lambda: agents[0].summary("done") == f"done at step {step}; 0 faults survived", "it is told")
        assert agents[1].summary("done") == ""
    finally:
        for agent in agents:
            agent.close()


def trained(environment: Mapping[str, str], step: int) -> None:
    """A rank has completed this step in the attempt."""
    hello = msgspec.structs.replace(HELLO, attempt=int(environment["LASTGASP_ATTEMPT"]))
    with closing(Link(environment["LASTGASP_CONTROLLER"], environment["LASTGASP_TOKEN"], hello)) as link:
        link.send(m.Begin(step=step, durable=0, buffer_fd=-1))


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("late", [0, 1])
def test_a_job_without_an_id_has_a_name_of_its_own(late: int) -> None:
    """torch calls each of them "none": what another one has saved in this directory would pass for this one's."""
    agents, group = [LaunchAttempts(), LaunchAttempts()], Group(group_world_size=2)
    replaced, other = agents[late], LaunchAttempts()
    try:
        attempts = begun(replace(group, store=Store()), *agents, run_id="none")
        agents[late] = LaunchAttempts()
        attempts += begun(replace(group, store=Store()), *agents, run_id="none")
        [another] = begun(Group(), other, run_id="none")
    finally:
        for agent in (*agents, replaced, other):
            agent.close()
    [name] = {one.environment["LASTGASP_JOB"] for one in attempts}  # also once the first agent has been replaced
    assert len({one.environment["LASTGASP_SINCE"] for one in attempts}) == 1
    assert another.environment["LASTGASP_JOB"] not in ("none", name)


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize("behind", [0, 1])
def test_a_job_has_begun_by_the_clock_that_is_ahead(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the other one, what an earlier job of this name saved an hour ago would have been saved by this one."""
    hour = 3600 * 10**9
    now = {True: 97 * hour, False: 100 * hour}

    def launcher(is_behind: bool, later: int = 0) -> LaunchAttempts:
        monkeypatch.setattr("lastgasp._clock.wall_ns", lambda: now[is_behind] + later)
        return LaunchAttempts()

    agents, replaced = [launcher(behind == 0), launcher(behind == 1)], list[LaunchAttempts]()
    told = begun(Group(group_world_size=2), *agents)
    for late in (0, 1):  # who comes later, into the job that has begun, has no word in it
        replaced.append(agents[late])
        agents[late] = launcher(is_behind=behind == late, later=hour)
        told += begun(Group(group_world_size=2), *agents)
    for agent in (*agents, *replaced):
        agent.close()
    assert {one.environment["LASTGASP_SINCE"] for one in told} == {str(100 * hour)}


def test_the_same_where_the_launcher_knows_nothing_of_lastgasp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGASP_JOB", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    names = [place_in_job(0, 1, data_parallel(1), lambda value: value).job for _ in range(2)]
    assert names[0] == names[1] != "none"
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert place_in_job(0, 1, data_parallel(1), lambda value: value).job not in (names[0], "none")


def test_ranks_whose_clocks_differ_write_their_marks_into_one_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the job has no controller: by the launcher's word, or by rank 0's."""
    monkeypatch.setenv("LASTGASP_PROFILING_DIR", str(tmp_path))
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    clock, told = iter(range(1_000, 100_000, 1_500)), list[Any]()
    monkeypatch.setattr("lastgasp._clock.wall_ns", lambda: next(clock) * 1_000_000)

    def from_rank_0(value: Any) -> Any:
        told.append(value)
        return told[0]

    def task(rank: int, size: int = 2) -> str:
        told[rank:] = []
        place = place_in_job(rank, size, data_parallel(size), from_rank_0 if size > 1 else lambda value: value)
        recorder = open_recorder(Marking(), place, None, tmp_path)
        assert recorder is not None
        recorder.close()
        return recorder.directory.parent.name

    monkeypatch.setenv("LASTGASP_JOB", "job")
    assert task(0) == task(1) == "default_task_id_1_000000000"
    assert len({task(0, 1) for _ in range(3)}) == 3, "runs of one rank are no ranks of one job"
    monkeypatch.setenv("LASTGASP_SINCE", "5000000007")
    assert task(0) == task(1) == task(0, 1) == "default_task_id_5_000000007"


def test_what_mindclusters_job_has_saved_is_its_own_also_where_its_pods_were_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LASTGASP_SINCE", "5000000007")
    monkeypatch.setenv("LASTGASP_JOB", "7c9e6679")
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    assert place_in_job(0, 1, data_parallel(1), lambda value: value).since_ns == 5_000_000_007
    monkeypatch.setenv("MINDX_TASK_ID", "7c9e6679")
    assert place_in_job(0, 1, data_parallel(1), lambda value: value).since_ns == 0


def test_several_nodes_without_an_address_are_none_of_our_business(caplog: pytest.LogCaptureFixture) -> None:
    """A job without lastgasp hears nothing; its ranks refuse with the reason, if they use it."""
    attempts = LaunchAttempts()
    with caplog.at_level(logging.DEBUG):
        found = begin(attempts, Group(group_world_size=1 + 1), [LaunchAttempts()])
    assert attempts.close() == ""
    assert caplog.text == ""
    assert "spans 2 nodes" in found["LASTGASP_NO_CONTROLLER"] and "set LASTGASP_BIND" in found["LASTGASP_NO_CONTROLLER"]
    assert not found["LASTGASP_CONTROLLER"] and "LASTGASP_TOKEN" not in found


def test_a_first_node_without_lastgasp_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """torch's own exchange comes behind ours: what is not in the store then will not come."""
    second, group = LaunchAttempts(), Group(group_world_size=2, group_rank=1, store=Store())
    second.offer(group.store, 1, 2, "job", fresh_store=True)
    with caplog.at_level(logging.DEBUG):
        found = second.begin(group, "job", fresh_store=True)  # type: ignore[arg-type]
    second.close()
    assert caplog.text == "" and not found.led
    assert "install it on every node" in found.environment["LASTGASP_NO_CONTROLLER"]


def test_an_address_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_BIND", "192.0.2.1")
    monkeypatch.setenv("LASTGASP_LAUNCHER", "run")
    with pytest.raises(ConfigError, match=r"LASTGASP_BIND='192\.0\.2\.1' is not allowed: expected an address of this"):
        begin(LaunchAttempts(), Group(group_world_size=2), [LaunchAttempts()])
    monkeypatch.delenv("LASTGASP_LAUNCHER")
    found = begin(LaunchAttempts(), Group(group_world_size=2), [LaunchAttempts()])
    assert "192.0.2.1" in found["LASTGASP_NO_CONTROLLER"], "a job under torchrun may have no rank that asks for it"


def test_an_address_that_nobody_has_set_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_LAUNCHER", "run")
    monkeypatch.setattr(attempts_module, "loopback", lambda: "192.0.2.1")
    found = begin(LaunchAttempts(), Group(group_world_size=1), [])
    assert "cannot listen at 192.0.2.1 (" in found["LASTGASP_NO_CONTROLLER"] and not found["LASTGASP_CONTROLLER"]


@pytest.mark.parametrize("missing", ["LASTGASP_CONTROLLER", "LASTGASP_TOKEN"])
def test_half_an_address_is_none(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setenv("LASTGASP_CONTROLLER", "127.0.0.1:1")
    monkeypatch.setenv("LASTGASP_TOKEN", "t")
    assert Contact.from_environment() == Contact("127.0.0.1:1", "t")
    monkeypatch.setenv(missing, "")
    assert Contact.from_environment() is None


# -- the hold --------------------------------------------------------------------------------------


class Context:
    """As much of torch's PContext as the hold touches."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """What sends the signals."""
        self._log.append(f"close {death_sig} {timeout}")


@pytest.mark.parametrize("used", [True, False])
def test_torch_cannot_send_its_signals_past_the_hold(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """Whenever torch's own poll finds the dead worker, it closes; that is where it holds."""
    log: list[str] = []
    agent = GaspAgent.__new__(GaspAgent)
    agent._attempts, agent._attempt, agent._signals = LaunchAttempts(), LaunchAttempt(number=0), StopSignals()
    agent._in_place = SimpleNamespace(report_exits=lambda failed: log.append("told"))  # type: ignore[assignment]
    monkeypatch.setattr(agent, "_failed", lambda group: {0: "exited with code 87"})
    monkeypatch.setattr(LaunchAttempt, "in_use", lambda self: used)
    monkeypatch.setattr(agent, "_pcontext", Context(log), raising=False)
    monkeypatch.setattr(agent, "_allow_restarts", lambda group: log.append("restarts"))
    monkeypatch.setattr(agent, "_hold", lambda group: log.append("hold"))
    agent._hold_before_closing(Group())  # type: ignore[arg-type]
    assert agent._pcontext is not None
    agent._pcontext.close()
    held = ["restarts", "hold"] if used else ["told"]
    assert log == [*held, "close None 30"]
    log.clear()
    agent._pcontext.close(signal.SIGTERM, 5)
    assert log == [f"close {signal.SIGTERM} 5"], "the launcher was asked to stop: no hold, the signal goes out"


def holding(
    monkeypatch: pytest.MonkeyPatch, codes: Mapping[int, object], undecided: bool = False, nobody_comes: bool = False
) -> tuple[Any, list[float]]:
    """An agent whose two ranks have ended so, or run; and its clock, which goes on by a second at each look."""
    agent: Any = GaspAgent.__new__(GaspAgent)
    now = [100.0]
    agent._attempt, agent._worker_group = LaunchAttempt(number=0), Group()
    nothing: Any = lambda *_: None  # noqa: E731
    agent._in_place = SimpleNamespace(
        offer_in_time=nothing, report_exit=nothing, replaced=nothing, undecided=undecided, nobody_comes=nobody_comes
    )
    monkeypatch.setattr(agent, "_codes", lambda group: codes)
    monkeypatch.setattr(agent, "_pid", lambda group, rank: 7)
    monkeypatch.setattr(LaunchAttempt, "hold_limit", lambda self: 1210.0)
    monkeypatch.setattr("lastgasp.launch.agent._clock.monotonic", lambda: now[0])
    monkeypatch.setattr("lastgasp.launch.agent.time.sleep", lambda seconds: now.append(now.pop() + 1))
    return agent, now


@pytest.mark.parametrize("left", [True, False])
def test_behind_a_training_that_all_have_ended_no_recovery_is_waited_for(
    left: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 has failed there, and rank 0 still writes its results; torch would stop it at once."""
    agent, now = holding(monkeypatch, {0: None, 1: 1})
    entries = {rank: signin.Entry(rank=rank, pid=7, hold=1.0, directory="", left=left) for rank in (0, 1)}
    monkeypatch.setattr(signin.Desk, "entries", entries)
    assert not agent._hold(agent._worker_group)
    waited = finishing.FINISH if left else 1210.0
    assert waited <= now[0] - 100 < waited + 2
    assert f"did not finish within {waited:g} s" in caplog.text


@pytest.mark.parametrize(("left", "limit"), [(False, 1210), (True, FINISH)])
def test_a_host_whose_ranks_are_all_dead_is_one_that_has_ended_its_training_if_they_have(
    left: bool, limit: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others may agree to replace them, which takes them as long as any recovery; no failure behind the end."""
    agent, now = holding(monkeypatch, {0: -9, 1: -9}, undecided=True)
    agent._attempt.desk.entries.update({rank: SimpleNamespace(left=left) for rank in (0, 1)})
    assert not agent._hold(agent._worker_group)
    assert limit <= now[0] - 100 < limit + 2
    assert "survivors" not in caplog.text, "there are none"


@pytest.mark.parametrize(("nobody", "waited"), [(True, 0), (False, 16)])
def test_new_processes_do_not_wait_for_survivors_that_have_ended(
    nobody: bool, waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was to go on, and has ended as well; rank 1 is the new process, which meets nobody."""
    agent, now = holding(monkeypatch, {0: -9, 1: None}, nobody_comes=nobody)
    monkeypatch.setattr(LaunchAttempt, "over_for", lambda self: now[0] - 100)
    assert not agent._hold(agent._worker_group)
    assert now[0] - 100 == waited


# -- progress of an attempt ------------------------------------------------------------------------


def status(step: int) -> m.Status:
    """A heartbeat."""
    return m.Status(step=step, durable=0, tick=1, phase="data")


def test_an_attempt_that_resumes_and_fails_made_no_progress() -> None:
    """Heartbeats from before the Begin are at step 0, whatever the job resumes from."""
    attempt = Attempt.of(msgspec.structs.replace(HELLO))
    attempt.heard_step(0, status(0))
    attempt.heard_step(0, m.Begin(step=3, durable=3, buffer_fd=-1))
    attempt.heard_step(0, status(3))
    attempt.heard_step(1, status(0))
    assert not attempt.progressed
    attempt.heard_step(0, status(4))
    assert attempt.progressed


def test_who_has_led_an_attempt_hands_it_back_at_the_end_of_a_training() -> None:
    """The ranks end it one after the other, and begin the next one as early as they can."""
    attempt = Attempt.of(HELLO)
    machine = attempt.machine
    attempt.led_by("MindIO")
    assert isinstance(attempt.machine, Observer)
    for leader in ("MindIO", "", ""):
        attempt.led_by(leader)
    assert attempt.machine is machine


def test_an_attempt_without_a_begin_made_none() -> None:
    attempt = Attempt.of(HELLO)
    attempt.heard_step(0, status(7))
    assert not attempt.progressed
