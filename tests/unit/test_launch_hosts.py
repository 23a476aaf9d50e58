"""What a launcher of several hosts knows and says, without hosts."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from lastgasp import topology
from lastgasp.events import Incident, encode_incident
from lastgasp.gasp import signin
from lastgasp.gasp.lifeline import LOST_AFTER
from lastgasp.gasp.signin import VARIABLE, Desk, Entry, sign
from lastgasp.launch import forward, lost, torchrun_hook
from lastgasp.launch.attempts import LaunchAttempt
from lastgasp.launch.forward import Forwarder
from lastgasp.launch.lastword import LastWord, last_word
from lastgasp.launch.lost import lost_rendezvous, never_taken_in, spare, tell_success
from lastgasp.launch.missing import Waiting, is_alone
from lastgasp.launch.restarts import Restarts
from lastgasp.launch.stores import guard_connections, own_address
from support.waiting import until

ENTRY = Entry(rank=1, pid=7, hold=30.0, directory="ckpts")


# -- ranks sign in ---------------------------------------------------------------------------------


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    found = Desk()
    monkeypatch.setenv(VARIABLE, found.environment[VARIABLE])
    yield found
    found.close()


def test_a_launcher_knows_its_ranks_without_asking_anybody(desk: Desk) -> None:
    here = LaunchAttempt(number=0, desk=desk)
    assert not here.in_use(), "a job without lastgasp"
    sign(ENTRY)
    assert here.in_use() and here.hold_limit() == 30.0
    sign(Entry(rank=1, pid=7, hold=30.0, directory="ckpts", ending="saved", step=5))
    desk.close()
    assert here.in_use() and here.last_word() == LastWord("saved", 5, "ckpts")
    sign(ENTRY)  # to a launcher that is gone: of no effect


def test_a_launcher_reads_what_ranks_write_in_their_ten_thousandth_training(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sweep does; it had read no more than the first so many lines."""
    monkeypatch.setattr(signin, "_LIMIT", 1000)
    for training in range(100):
        sign(Entry(rank=training % 2, pid=training, hold=30.0, directory="ckpts"))
    assert [desk.entries[rank].pid for rank in (0, 1)] == [98, 99]
    line = msgspec.json.encode(Entry(rank=1, pid=7, hold=30.0, directory="ckpts")) + b"\n"
    with Path(desk.environment[VARIABLE]).open("ab", buffering=0) as file:
        file.write(line[:20])
        assert desk.entries[1].pid == 99, "it is being written"
        file.write(line[20:])
    assert desk.entries[1].pid == 7


def test_a_child_of_a_rank_signs_in_by_the_path_that_it_inherits(desk: Desk) -> None:
    code = "from lastgasp.gasp.signin import *; sign(Entry(rank=0, pid=1, hold=1.0, directory='d'))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
    assert set(desk.entries) == {0}


def test_the_records_tell_where_no_rank_of_this_host_could(tmp_path: Path) -> None:
    """Its only rank was killed."""
    killed = {1: Entry(rank=1, pid=7, hold=1.0, directory=str(tmp_path))}
    assert last_word(killed, "job", 0) == LastWord()
    (tmp_path / "incidents").mkdir()
    for attempt, step in ((0, 5), (1, 9)):
        incident = Incident(id=f"{attempt}", job="job", attempt=attempt, world_size=2, ending="saved", step_saved=step)
        (tmp_path / "incidents" / f"{attempt}.json").write_bytes(encode_incident(incident))
    found = last_word(killed, "job", 0)
    assert found == LastWord("saved", 5, str(tmp_path)) and found.safe == f"step 5 is safe in {tmp_path}"
    assert last_word(killed, "another job", 0) == LastWord()


def test_the_records_of_an_earlier_job_of_the_same_name_tell_nothing(tmp_path: Path, desk: Desk) -> None:
    """`--rdzv-id exp1` yesterday and today; attempts count from 0 in each."""
    (tmp_path / "incidents").mkdir()
    desk.entries[1] = Entry(rank=1, pid=7, hold=1.0, directory=str(tmp_path))
    today = LaunchAttempt(number=0, desk=desk, environment={"LASTGASP_JOB": "exp1", "LASTGASP_SINCE": "2000"})
    for detected, step in ((1999, 5), (2001, 9)):
        found = Incident(id=str(detected), job="exp1", attempt=0, world_size=2, ending="saved", step_saved=step)
        found.phases.detected = detected
        assert today.last_word() == LastWord()
        (tmp_path / "incidents" / f"{detected}.json").write_bytes(encode_incident(found))
    assert today.last_word() == LastWord("saved", 9, str(tmp_path))


@pytest.mark.parametrize("files", [["step-5.pt"], []])
def test_a_step_that_was_written_before_the_job_went_on_in_place_is_safe(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "incidents").mkdir()
    incident = Incident(id="1", job="job", attempt=0, world_size=2, ending="in_place", step_saved=5, files=files)
    (tmp_path / "incidents" / "1.json").write_bytes(encode_incident(incident))
    found = last_word({1: Entry(rank=1, pid=7, hold=1.0, directory=str(tmp_path))}, "job", 0)
    assert found.safe == (f"step 5 is safe in {tmp_path}" if files else "")


# -- connections -----------------------------------------------------------------------------------


def test_connections_that_torch_has_opened_end_with_their_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as there, server.accept()[0] as here:
            assert guard_connections() >= 2
            for end in (there, here):
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_AFTER * 1000
            assert own_address(port) == "127.0.0.1"
    assert own_address(port) == "", "there is no such connection any more"


def test_sigterm_reaches_the_ranks_while_the_main_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "STUCK", 0.1)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    rank = subprocess.Popen(["sleep", "100"])
    forwarder = Forwarder(threading.Event(), lambda: [rank.pid])
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGTERM
    finally:
        forwarder.close()
        rank.kill()
        rank.wait()
        signal.signal(signal.SIGTERM, before)


def test_ranks_that_the_main_thread_stops_are_not_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    acting, asked = threading.Event(), list[int]()
    acting.set()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    forwarder = Forwarder(acting, lambda: asked)
    monkeypatch.setattr(forwarder, "_forward", lambda: asked.append(1))
    os.kill(os.getpid(), signal.SIGTERM)
    forwarder.close()
    signal.signal(signal.SIGTERM, before)
    assert asked == []


# -- who is waited for -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """As torch's _NodeDesc."""

    addr: str
    pid: int = 1


@dataclass
class State:
    """As torch's _RendezvousState."""

    participants: dict[Node, int]
    wait_list: set[Node] = field(default_factory=set)
    redundancy_list: set[Node] = field(default_factory=set)


class Handler:
    """As torch's DynamicRendezvousHandler, as far as it is looked at."""

    _this_node: Node | None = None

    def __init__(self, *names: str, min_nodes: int = 3) -> None:
        self._state_holder = self.settings = self
        self.max_nodes = min_nodes
        self.state, self.min_nodes = State({Node(name): rank for rank, name in enumerate(names)}), min_nodes


def test_hosts_that_are_missing_are_named() -> None:
    before = Counter(["ha", "hb", "hc"])
    waiting = Waiting(Handler("ha"), before, lambda: "step 5 is safe in ckpts")
    assert waiting.text() == "waiting for hb, hc to come back; step 5 is safe in ckpts"
    assert Waiting(Handler("ha"), None, str).text() == "waiting for 2 of 3 hosts (here: ha)"
    between = Handler()
    between._this_node = Node("ha")
    assert Waiting(between, before, str).text() == "waiting for hb, hc to come back", "this host is not missing"
    assert Waiting(object(), before, str).text() == "waiting for other hosts", "another kind of rendezvous"
    spare = Handler("ha", "hb", "hc")
    spare._this_node = Node("hb", 2)
    spare.state.redundancy_list.add(spare._this_node)
    text = "waiting: the job runs with all its hosts (ha, hb, hc); this launcher is one too many, or a spare"
    assert Waiting(spare, None, str).text() == text


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_of_one_host_waits_for_nobody(nodes: int) -> None:
    static = StaticTCPRendezvous("127.0.0.1", 1, 0, nodes, "run", 60)
    assert is_alone(Handler(min_nodes=nodes)) == is_alone(static) == (nodes == 1)
    assert not is_alone(object()), "another kind of rendezvous"


def test_the_end_without_the_others_says_what_is_safe() -> None:
    hosts, safe = Counter(["ha", "hb"]), "step 5 is safe in ckpts"
    text = lost_rendezvous(RendezvousTimeoutError(), hosts, safe)
    assert text.startswith("stopped: not all hosts of the job (ha, hb) have come back in time; step 5 is safe in ckpts")
    text = lost_rendezvous(RendezvousConnectionError("broken"), hosts, "")
    assert "the job's rendezvous cannot be reached" in text and "(broken)" in text and "lastgasp incident" in text
    assert "If launchers of other hosts (ha, hb) still run, the job may go on without this one: start only this" in text
    assert "the launcher of another host of the job (ha, hb) has ended it" in lost_rendezvous(
        RendezvousClosedError(), hosts, safe
    )


# -- starts given up on ---------------------------------------------------------------------------


def test_two_starts_that_fail_alike_are_enough() -> None:
    restarts = Restarts(always=True)
    restarts.ended(0, used=False, progressed=False, how=frozenset({2}))
    assert not restarts.should_give_up
    restarts.ended(1, used=False, progressed=False, how=frozenset({1}))
    assert not restarts.should_give_up, "they failed otherwise"
    restarts.ended(2, used=False, progressed=False, how=frozenset({1}))
    assert restarts.should_give_up and "2 starts in a row failed in the same way (exit code 1)" in restarts.verdict


def test_a_rank_that_the_launcher_has_stopped_does_not_say_how_a_start_failed() -> None:
    """One rank failed, and torch ended the other one: which comes first is chance, and no start was like another."""
    restarts = Restarts(always=True)
    restarts.ended(0, used=False, progressed=False, how=frozenset({1, -15}))
    restarts.ended(1, used=False, progressed=False, how=frozenset({1}))
    assert restarts.should_give_up and "in the same way (exit code 1)" in restarts.verdict
    told = Restarts(always=True)
    told.ended(0, used=False, progressed=False, how=frozenset({-15}))
    assert told.starts == 1, "where nobody failed otherwise it tells"


@pytest.mark.parametrize("used", [True, False])
def test_starts_that_ranks_have_joined_are_counted_otherwise(used: bool) -> None:
    restarts = Restarts(always=used)
    for attempt in range(3):
        restarts.ended(attempt, used=used, progressed=False, how=frozenset({1}))
    assert not restarts.should_give_up


def test_a_launcher_without_the_controller_hears_that_its_rank_has_refused(desk: Desk) -> None:
    """It had left that to the first one, started the rank again, and waited for hosts that had ended with 87."""
    one = LaunchAttempt(number=0, desk=desk)
    assert one.progressed()
    sign(ENTRY)
    assert not one.progressed(refused=True)
    sign(Entry(rank=1, pid=7, hold=30.0, directory="ckpts", ending="nothing_to_save", step=0))
    assert not one.progressed(refused=True)
    sign(Entry(rank=1, pid=7, hold=30.0, directory="ckpts", ending="saved", step=5))
    assert one.progressed(refused=True), "the step counts, and the next start may go on from it"


# -- another torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["gone", "other arguments", "no /proc"])
def test_under_another_torch_torchrun_runs_as_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    api = ModuleType("api")
    vars(api)["LocalElasticAgent"] = LocalElasticAgent
    if change == "gone":
        monkeypatch.setitem(torchrun_hook._OVERRIDDEN, "_no_such_method", (("self",),))
    elif change == "no /proc":
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    else:
        monkeypatch.setitem(torchrun_hook._OVERRIDDEN, "_shutdown", (("self", "more"),))
    with caplog.at_level(logging.WARNING, "lastgasp.launch"):
        torchrun_hook.swap_agent(api)
    assert vars(api)["LocalElasticAgent"] is LocalElasticAgent
    assert len(caplog.records) == 1 and "the job runs without lastgasp's hold" in caplog.text


def test_without_proc_connections_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", gone)
    assert guard_connections() == 0 and own_address(1) == ""


def test_a_host_without_a_boot_id_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes have part of /proc."""
    whole = topology.host_identity()

    def gone(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", gone)
    assert topology.host_identity() == f"{socket.gethostname()}:{whole.partition(':')[2]}"


@pytest.mark.parametrize(("ended", "code"), [("well", 0), ("not well", 1), ("with its store", 1)])
def test_a_spare_ends_with_0_where_the_job_has_ended_well(
    ended: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = SimpleNamespace(_store=HashStore())
    if ended == "well":
        tell_success(handler, wait=True)
    if ended == "with its store":
        handler = SimpleNamespace()
    assert spare(handler).code == code
    assert ("not well" in capsys.readouterr().err) == (code != 0)


class Rendezvous:
    """torch's handler, at which so many launchers wait."""

    def __init__(self, waiting: int) -> None:
        self._store, self.closed, self._state_holder = HashStore(), False, self
        self.state = SimpleNamespace(wait_list={*range(waiting)}, redundancy_list=set())

    def sync(self) -> None:
        """As torch's."""

    def set_closed(self) -> None:
        """As torch's."""
        self.closed = True


def test_a_launcher_that_comes_too_late_hears_how_the_job_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    handler = Rendezvous(1)
    teller = threading.Thread(target=tell_success, args=[handler, True])
    teller.start()
    until(lambda: handler.closed, "the rendezvous is closed")
    end = never_taken_in(RendezvousClosedError(), handler)
    assert end is not None and end.code == 0 and "ended, and well, before" in capsys.readouterr().err
    teller.join(60)
    assert not teller.is_alive()
    end = never_taken_in(RendezvousConnectionError("broken"), Handler())
    assert end is not None and end.code == 1 and "cannot be reached any more" in capsys.readouterr().err
    end = never_taken_in(RendezvousClosedError(), Rendezvous(0))
    assert end is not None and end.code == 1 and "is closed" in capsys.readouterr().err
    assert never_taken_in(RendezvousTimeoutError(), Rendezvous(0)) is None
    assert spare(Handler(), well=True).code == 0


def test_the_end_waits_for_nobody_where_nobody_waits() -> None:
    handler = Rendezvous(0)
    tell_success(handler, wait=True)
    assert not handler.closed


def test_the_end_does_not_wait_for_launchers_of_others() -> None:
    """Under plain torchrun: those that wait would never say that they have heard."""
    handler = Rendezvous(1)
    tell_success(handler, wait=False)
    assert not handler.closed and spare(handler).code == 0


def test_the_end_waits_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost, "TOLD", 0.0)
    handler = Rendezvous(1)
    tell_success(handler, wait=True)
    assert handler.closed


def test_a_rank_of_another_user_than_its_launcher_says_once_what_that_costs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may not open the desk in /proc, which was taken for a launcher that is gone."""

    def denied(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(signin, "_told", [])
    monkeypatch.setattr(signin.os, "open", denied)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "lastgasp"):
        sign(ENTRY)
        sign(ENTRY)
    [said] = caplog.messages
    own = os.geteuid()
    assert said.startswith(f"this process runs as user {own}, and its launcher as user {own}: what this rank tells")
    assert not desk.entries
