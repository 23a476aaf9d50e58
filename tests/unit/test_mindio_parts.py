"""The parts of the MindIO backend that decide: limits, addresses, replicas, strategies, faults, the window, the end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.backends.ascend.mindio import api, exits, limits, shutdown, validation
from lastgasp.backends.ascend.mindio.controller import Endpoint, Once, _answer, ask_for_dump, serve, tell_used
from lastgasp.backends.ascend.mindio.handlers import answering
from lastgasp.backends.ascend.mindio.replicas import group_of, replica_info
from lastgasp.backends.ascend.mindio.scaling import scaled_in, scaled_out
from lastgasp.backends.ascend.mindio.strategies import CANNOT, decide_strategies
from lastgasp.backends.ascend.mindio.window import Window
from lastgasp.errors import ConfigError, DeadlineExceeded, NotSaveable
from lastgasp.gasp.messages import Release, Status
from lastgasp.gasp.progress import Progress
from lastgasp.gasp.rank_status import RankStatus, Released
from lastgasp.gasp.starter import Starter
from lastgasp.topology import Place, ReplicaGroups, data_parallel

GIB = 1 << 30


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "save", "limit"),
    [(0, 600.0, 635), (0, 5000.0, 5035), (0, 10.0, 180), (100 * GIB, 600.0, 572), (GIB, 600.0, 180)],
)
def test_the_limit_grows_with_the_state(nbytes: int, save: float, limit: int) -> None:
    assert limits.action_limit(nbytes, save, 10.0) == limit


def test_the_environment_is_set_once_and_too_short_a_limit_is_named(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    assert limits.prepare(environ, 635, tmp_path / "logs") == []
    assert environ == {"TTP_NORMAL_ACTION_TIME_LIMIT": "635", "TTP_LOG_PATH": str(tmp_path / "logs")}
    [said] = limits.prepare(environ | {"TTP_NORMAL_ACTION_TIME_LIMIT": "60"}, 635, tmp_path)
    assert said.startswith("TTP_NORMAL_ACTION_TIME_LIMIT=60 is shorter than a save may take here (635 s)")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TTP_NORMAL_ACTION_TIME_LIMIT", "29"), ("TTP_NORMAL_ACTION_TIME_LIMIT", "1801"), ("TTP_RETRY_TIMES", "0"),
        ("MINDIO_WAIT_MINDX_TIME", "30 s"), ("TTP_STOP_CLEAN_BEFORE_DUMP", "yes"), ("TTP_RETRY_TIMES", ""),
    ],
)  # fmt: skip
def test_what_mindio_would_silently_not_take_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        limits.check_environment({name: value})


def test_a_log_path_that_is_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="no symlink"):
        limits.check_environment({"TTP_LOG_PATH": str(tmp_path / "link")})


def test_a_limit_beyond_what_mindio_takes_is_reported(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    [said] = limits.prepare(environ, 5035, tmp_path)
    assert environ["TTP_NORMAL_ACTION_TIME_LIMIT"] == "1800"
    assert said.endswith("lower save_timeout") and "(5035 s)" in said


def test_the_limit_of_a_controller_in_taskd_is_none_of_a_ranks(tmp_path: Path) -> None:
    """Its environment is that of the agent: what this process sets comes too late for it."""
    [said] = limits.prepare({}, 635, tmp_path, taskd=True)
    assert "set TTP_NORMAL_ACTION_TIME_LIMIT=635 in the job's YAML" in said
    assert limits.prepare({"TTP_NORMAL_ACTION_TIME_LIMIT": "635"}, 635, tmp_path, taskd=True) == []


# -- addresses -------------------------------------------------------------------------------------


def test_addresses() -> None:
    assert validation.address_of("127.0.0.1:8000", "X") == validation.Address("127.0.0.1", 8000)
    assert validation.address_of("[::1]:8000", "X") == validation.Address("::1", 8000)


@pytest.mark.parametrize("text", ["0.0.0.0:8000", ":::8000", "127.0.0.1:80", "127.0.0.1:x", "127.0.0.1", ":8000", ""])
def test_addresses_that_would_end_the_process_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="WHERE"):
        validation.address_of(text, "WHERE")


@pytest.mark.parametrize("size", [(0, 100_001), (2, 2), (-1, 2), (True, 2), (0, 2.0)])
def test_sizes_that_would_end_the_process_are_refused(size: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="rank, world_size"):
        validation.check_size(*size)


def test_somebody_must_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = validation.Address("127.0.0.1", server.getsockname()[1])
        validation.wait_for_listener(here, 5.0)
    with pytest.raises(DeadlineExceeded, match=rf"MindIO's controller at 127.0.0.1:{here.port}"):
        validation.wait_for_listener(here, 0.05)


# -- replicas --------------------------------------------------------------------------------------


def place(rank: int, world: int, groups: ReplicaGroups) -> Place:
    """Of one rank."""
    return Place(rank=rank, world_size=world, replicas=groups)


def test_each_shard_is_a_group_that_holds_everything() -> None:
    assert replica_info(place(1, 3, data_parallel(3))) == [
        {"rank_list": [0, 1, 2], "replica_cnt": 3, "replica_shift": 0}
    ]
    there = place(3, 4, ((2, 0), (3, 1)))
    assert replica_info(there) == [{"rank_list": [1, 3], "replica_cnt": 2, "replica_shift": 0}]
    assert group_of(there) == (1, 3)
    assert all(type(rank) is int for rank in replica_info(there)[0]["rank_list"])


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (((0, 1), (2,)), "the same number of holders"),
        (((0, 1), (1, 2)), "exactly one shard on each rank"),
        (((0, 1),), "exactly one shard on each rank"),
    ],
)
def test_what_mindio_cannot_describe_is_refused(groups: ReplicaGroups, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        replica_info(place(0, 3, groups))
    assert "LASTGASP_BACKEND=embedded" in str(caught.value)


# -- strategies ------------------------------------------------------------------------------------


def test_nothing_is_asked_for_and_nothing_is_refused() -> None:
    found = decide_strategies("", "it cannot", taskd=False, nodes=1, mindspore=False)
    assert (found.retry, found.recover, found.elastic, dict(found.refused)) == (False, False, False, {})


def test_what_the_adapter_can_do_is_granted() -> None:
    assert decide_strategies("", "", taskd=False, nodes=1, mindspore=False).retry
    found = decide_strategies("retry,recover,dump", "", taskd=True, nodes=2, mindspore=False)
    assert (found.retry, found.recover, found.elastic) == (True, True, False)
    found = decide_strategies("elastic-training", "", taskd=True, nodes=2, mindspore=False, no_fewer="")
    assert (found.retry, found.recover, found.elastic, found.any_in_place) == (False, False, True, True)


DP = '{"scale-in-strategy": "DP"}'


def test_who_goes_on_alone_is_checked() -> None:
    assert scaled_in([0, 2, 3], [0, 2, 3], DP, place(2, 4, data_parallel(4))) == (0, 2, 3)


@pytest.mark.parametrize(
    ("world", "dp", "parameter", "why"),
    [
        ([0, 2], [0, 2], '{"scale-in-strategy": "TP"}', "'TP' is not known"),
        ([0, 2], [0, 2], "{}", "None is not known"),
        ([0, 2], [0, 2], "DP", "cannot be read"),
        ([0, 2], [0, 2], "", "cannot be read"),
        ([2, 3], [2, 3], DP, "ranks 0 to 3"),
        ([0, 2, 4], [0, 2, 4], DP, "ranks 0 to 3"),
        ([0, 1, 2, 3], [0, 1, 2, 3], DP, "ranks 0 to 3"),
        ([], [], DP, "ranks 0 to 3"),
        ([0, 1], [0, 1], DP, "not among those"),
        ([0, 1, 2], [0, 2], DP, "every rank must hold all"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(
    world: list[int], dp: list[int], parameter: str, why: str
) -> None:
    with pytest.raises(NotSaveable, match=why):
        scaled_in(world, dp, parameter, place(2, 4, data_parallel(4)))


UP = '{"scale-out-strategy": "DP"}'


def test_who_is_there_again_is_checked() -> None:
    assert scaled_out([1, 3], UP, (0, 2), 4) == (0, -1, 1, -1)


@pytest.mark.parametrize(
    ("returning", "parameter", "there", "why"),
    [
        ([1], UP, (0, 2), r"\(0, 2\) of 4 have gone on"), ([1, 2, 3], UP, (0, 2), "have gone on"),
        ([1], UP, (), "have gone on"), ([1, 3], DP, (0, 2), "None is not known"),
        ([1, 3], "{", (0, 2), "cannot be read"),
    ],
)  # fmt: skip
def test_an_order_to_scale_out_that_cannot_be_carried_out_is_refused(
    returning: list[int], parameter: str, there: tuple[int, ...], why: str
) -> None:
    with pytest.raises(NotSaveable, match=why):
        scaled_out(returning, parameter, there, 4)


@pytest.mark.parametrize(
    ("asked", "more", "why"),
    [
        ("retry", {"why_not": CANNOT}, "cannot roll a step back"),
        ("recover", {"taskd": False}, "only where TaskD asks for it"),
        ("arf", {"nodes": 1}, "two nodes"),
        ("elastic-training", {}, "fewer ranks"),
        ("elastic-training", {"no_fewer": "", "taskd": False}, "only where TaskD asks for it"),
        ("elastic-training", {"no_fewer": "", "nodes": 1}, "two nodes"),
        ("elastic-training", {"no_fewer": "", "no_recover": "no agent"}, "no agent"),
        ("elastic-training", {"mindspore": True}, "none of it with MindSpore"),
        ("magic", {}, "no such strategy"),
    ],
)
def test_what_it_cannot_is_refused_with_the_reason(asked: str, more: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"why_not": "", "taskd": True, "nodes": 2, "mindspore": False}
    found = decide_strategies(f"dump, {asked}", **(given | more))
    [refused] = found.refused.values()
    assert why in refused
    assert not (found.recover or found.elastic)


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cause", "state", "waits"),
    [
        ("exception", "ValueError: boom", "RS_UNKNOWN", False),
        ("exit", "SystemExit: 3", "RS_UNKNOWN", False),
        ("peer", "RuntimeError: connection closed by peer", "RS_UNKNOWN", True),
        ("exception", "RuntimeError: FORCE STOP. ...", "RS_NORMAL", False),
        ("peer", "RuntimeError: FORCE STOP. ...", "RS_NORMAL", False),
        ("exception", "RuntimeError: UCE ERROR", "RS_UNKNOWN", False),
    ],
)
def test_what_is_reported_to_mindio(kind: str, cause: str, state: str, waits: bool) -> None:
    found = exits.telling(kind, cause, retry=False)
    assert (found.state, found.after > 0) == (state, waits)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("UCE ERROR and FORCE STOP", "RS_UCE"), ("HBM MULTI BIT ECC time us= 7", "RS_UCE_CORRUPTED"),
        ("SUSPECT REMOTE ERROR", "RS_HCCL_FAILED"), ("STEP FINISH", "RS_STEP_FINISH"), ("other", "RS_UNKNOWN"),
    ],
)  # fmt: skip
def test_the_first_pattern_counts(text: str, state: str) -> None:
    assert exits.state_of(text, retry=True) == state


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_exits_of_a_framework_become_runtime_errors(error: BaseException) -> None:
    def train(step: int) -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        exits.without_exits(train)(1)
    assert caught.value.__cause__ is error


def test_the_end_of_a_recovery_is_no_exit_of_a_framework() -> None:
    """A rank that was released leaves with the code of the ending, and not by a second fault."""

    def train() -> None:
        raise Released(Release(recovery=0, ending="saved", step=3, path="p", reason=""))

    with pytest.raises(Released):
        exits.without_exits(train)()


def test_handlers_fail_by_exceptions_only() -> None:
    def bad(*given: object) -> None:
        raise SystemExit(2)

    with pytest.raises(RuntimeError, match="SystemExit: 2"):
        answering(bad)(1)


# -- the window ------------------------------------------------------------------------------------


class FakeWindow:
    """The three functions of the hot path, in order."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.error = error

    def tft_start_updating_os(self, backup_step: int) -> None:
        """Raises what the test wants."""
        self.calls.append(("start", backup_step))
        if self.error is not None:
            raise self.error

    def tft_end_updating_os(self, step: int) -> None:
        """Notes it."""
        assert type(step) is int
        self.calls.append(("end", step))

    def tft_pause_train(self, step: int) -> None:
        """Notes it."""
        self.calls.append(("pause", step))


def test_the_window_of_a_step() -> None:
    fake, status = FakeWindow(), RankStatus()
    window = Window(fake, status, 1.0)
    window.before_update()
    assert status.inside
    window.before_update()  # a second optimizer of the same step
    window.step_completed(7)
    assert (status.step, status.inside) == (7, False)
    assert fake.calls == [("start", -1), ("end", 7), ("pause", 7)]


class Pausing(FakeWindow):
    """MindX has ordered a pause, which lasts until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def tft_pause_train(self, step: int) -> None:
        """Waits."""
        self.asked.set()
        assert self.go.wait(60)


def hangs_within(progress: Progress, status: RankStatus, begin: int, end: int) -> bool:
    """Whether rank 0, whose heartbeats come each second, is taken for hung in that time."""
    for now in range(begin, end):
        beat = Status(step=7, durable=0, tick=status.beat(), phase="forward")
        progress.heard(0, beat, float(now))
        if progress.hung(float(now), frozenset()):
            return True
    return False


def test_a_pause_that_mindx_orders_is_no_hang_and_one_afterwards_is() -> None:
    fake, status, progress = Pausing(), RankStatus(), Progress(limit=5.0)
    trains = threading.Thread(target=Window(fake, status, 1.0).step_completed, args=(7,))
    trains.start()
    try:
        assert fake.asked.wait(60)
        progress.joined(0, 0.0)
        assert not hangs_within(progress, status, 0, 60)
    finally:
        fake.go.set()
        trains.join(60)
    assert (status.step, status.paused) == (7, 0.0)
    assert hangs_within(progress, status, 60, 70)


def test_a_pause_without_end_is_a_hang() -> None:
    status, progress = RankStatus(), Progress(limit=5.0)
    status.paused = 1e-9  # long ago
    progress.joined(0, 0.0)
    assert hangs_within(progress, status, 0, 10)


def test_who_leaves_a_pause_by_an_exception_is_not_paused_any_more() -> None:
    class Leaves(FakeWindow):
        def tft_pause_train(self, step: int) -> None:
            raise RuntimeError("STEP FINISH")

    status, told = RankStatus(), list[bool]()
    with pytest.raises(RuntimeError, match="STEP FINISH"):
        Window(Leaves(), status, 1.0, lambda: told.append(True)).step_completed(7)
    assert (status.step, status.paused, told) == (7, 0.0, [True])


def test_a_step_without_an_update_counts_for_mindio_too() -> None:
    fake, status = FakeWindow(), RankStatus()
    Window(fake, status, 1.0).step_completed(8)
    assert fake.calls == [("start", -1), ("end", 8), ("pause", 8)]


def test_force_stop_leaves_the_state_complete() -> None:
    status = RankStatus()
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        Window(FakeWindow(RuntimeError("FORCE STOP. x")), status, 1.0).before_update()
    assert not status.inside


def test_once_a_dump_has_begun_the_training_thread_parks_until_it_is_over() -> None:
    status = RankStatus()
    status.release(Release(recovery=0, ending="saved", step=3, path="p", reason=""))
    with pytest.raises(Released):
        Window(FakeWindow(Exception("error num:1")), status, 5.0).before_update()
    assert not status.inside


def test_a_step_without_an_update_parks_too_once_a_dump_has_begun() -> None:
    """Otherwise the rank would be at a step that MindIO has not ordered, and could not save."""
    status = RankStatus()
    status.step_completed(6)
    status.release(Release(recovery=0, ending="saved", step=6, path="p", reason=""))
    with pytest.raises(Released):
        Window(FakeWindow(Exception("error num:1")), status, 5.0).step_completed(7)
    assert (status.step, status.inside) == (6, False)


# -- the end ---------------------------------------------------------------------------------------


def test_a_destroy_that_returns_is_waited_for() -> None:
    called = threading.Event()
    assert shutdown.destroy(SimpleNamespace(tft_destroy_processor=called.set), 60.0)
    assert called.is_set()


def test_a_destroy_that_fails_is_no_error() -> None:
    def fail() -> None:
        raise SystemExit(2)

    assert shutdown.destroy(SimpleNamespace(tft_destroy_processor=fail), 60.0)


def test_a_destroy_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    release, ends = threading.Event(), []
    monkeypatch.setattr(shutdown, "_end_hard", lambda: ends.append(True))
    assert not shutdown.destroy(SimpleNamespace(tft_destroy_processor=release.wait), 0.05)
    assert ends == [True]
    release.set()


def test_a_controller_leaves_once_it_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False])
    monkeypatch.setattr("lastgasp.backends.ascend.mindio.controller.LINGER", 0.01)
    serve(lambda: next(answers, False), lambda: False, lambda: False)
    serve(lambda: False, lambda: True, lambda: False)


def test_a_controller_leaves_unused_once_its_starter_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastgasp.backends.ascend.mindio.controller.LINGER", 0.01)
    serve(lambda: False, lambda: False, lambda: True)


def test_a_dump_that_was_granted_to_one_rank_is_not_refused_to_the_next() -> None:
    """A refused rank reports a fault of its own, and is no longer a holder."""
    answers = iter([1, 0, 1, 1])
    once = Once(lambda: next(answers))
    assert [once() for _ in range(4)] == [1, 0, 0, 0]


def test_a_starter_that_has_ended_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        starter = Starter(process.pid)
        assert not starter.gone()
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert starter.gone()
    assert starter.gone()
    assert not Starter(-1).gone()
    os.close(starter._stat)


def test_a_request_that_fails_is_not_the_last_one() -> None:
    def fail() -> int:
        raise RuntimeError("not initialised")

    orders: dict[str, Any] = {"dump": fail, "used": lambda: 0}

    def answer() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            _answer(server, "secret", orders)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = Endpoint("127.0.0.1", 1, server.getsockname()[1], "secret")
        assert ask_for_dump(endpoint) == "nobody"
        assert tell_used(endpoint)
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60.0)


def test_nobody_to_ask_is_an_answer() -> None:
    assert ask_for_dump(Endpoint("127.0.0.1", 8000)) == "nobody"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert ask_for_dump(Endpoint("127.0.0.1", 8000, port, "secret")) == "nobody"


# -- the package -----------------------------------------------------------------------------------


def test_a_package_that_cannot_be_imported_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="torch_npu, or mindspore"):
        api.load()


def test_another_version_is_told_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*api.NAMES, *(f"tft_register_{name}_handler" for name in api.HANDLERS)]
    whole = SimpleNamespace(**dict.fromkeys(names, 1))
    monkeypatch.setattr(api, "_import", lambda name: whole)
    assert api.load() is whole
    del whole.tft_pause_train
    with pytest.raises(ConfigError, match="a version with tft_pause_train"):
        api.load()
